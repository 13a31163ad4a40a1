"""Maps of the pool and of plans against loops over every page, and their pictures."""

import importlib
import io
import subprocess
import sys

import numpy as np
import pytest
import rich.console

import jaxkv
from jaxkv import inspect, testing
from jaxkv.inspect import PageState, PageWrite


def _make_cache(num_shards=4, *, mode="assembled", pages_per_shard=16, **options):
    spec = jaxkv.CacheSpec(
        num_layers=1,
        kv=jaxkv.GQA(num_kv_heads=1, head_dim=2),
        page_size=4,
        pages_per_shard=pages_per_shard,
        dtype="float32",
    )
    mesh = testing.simulated_mesh(kv=num_shards)
    return jaxkv.KVCache(spec, mesh, mode=mode, **options)


def _run(cache, request, count):
    step = cache.plan([(request, count)])
    cache.commit(step, cache.pool)
    return step


def _make_busy_cache(**options):
    """Cached pages, three requests of which two share a prefix, and their next step."""
    cache = _make_cache(**options)
    done = cache.open(range(300, 340))
    _run(cache, done, 40)
    cache.close(done)
    first = cache.open(range(30))
    _run(cache, first, 30)
    second = cache.open([*range(26), *[77] * 30])
    _run(cache, second, 10)
    third = cache.open(range(100, 118))
    _run(cache, third, 18)
    cache.append(third, 5)
    cache.append(first, [3, 4, 5])
    step = cache.plan([(first, 3), (second, 20), (third, 1)])
    assert step is not None
    return cache, step


def _print(text) -> str:
    stream = io.StringIO()
    rich.console.Console(file=stream, width=200).print(text)
    return stream.getvalue()


# the pool


@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_every_page_of_the_pool_is_named_once(num_shards):
    cache, _ = _make_busy_cache(num_shards=num_shards, pages_per_shard=30)
    pool = inspect.pool_map(cache)
    assert (pool.num_shards, pool.pages_per_shard) == (num_shards, 30)
    stats = cache.stats()
    assert pool.count(PageState.RESERVED).tolist() == [1] * num_shards
    assert pool.count(PageState.FREE).tolist() == stats.free_pages.tolist()
    assert pool.count(PageState.PRIVATE).tolist() == stats.private_pages.tolist()
    protected = pool.count(PageState.PROTECTED)
    assert protected.tolist() == stats.protected_pages.tolist()
    cached = pool.count(PageState.CACHED) + protected
    assert cached.tolist() == stats.cached_pages.tolist()
    for owner, page in np.ndindex(num_shards, 30):
        logical = page * num_shards + owner
        ids = [r.id for r in cache.requests if logical in r.pages()]
        assert pool.num_requests[owner, page] == len(ids)
        assert pool.request_ids[owner, page] == min(ids, default=-1)


def test_a_new_pool_is_free_but_for_the_reserved_pages():
    pool = inspect.pool_map(_make_cache(2, pages_per_shard=3))
    free, reserved = PageState.FREE, PageState.RESERVED
    assert pool.states.tolist() == [[reserved, free, free]] * 2
    assert pool.request_ids.tolist() == [[-1, -1, -1]] * 2


def test_a_page_of_two_forks_is_private_once_the_tree_drops_it():
    cache = _make_cache(1, pages_per_shard=6)
    request = cache.open(range(8))
    _run(cache, request, 8)
    forks = cache.fork(request, 1)
    assert forks is not None
    (fork,) = forks
    states = inspect.pool_map(cache).states[0]
    assert states[request.pages()].tolist() == [PageState.PROTECTED] * 2
    cache.close(request)
    states = inspect.pool_map(cache).states[0]
    assert states[fork.pages()].tolist() == [PageState.CACHED] * 2
    cache.clear()
    pool = inspect.pool_map(cache)
    assert pool.states[0, fork.pages()].tolist() == [PageState.PRIVATE] * 2
    assert pool.request_ids[0, fork.pages()].tolist() == [fork.id] * 2


def test_pool_text_draws_one_character_a_page():
    cache = _make_cache(2, pages_per_shard=6)
    done = cache.open(range(8))
    _run(cache, done, 8)
    cache.close(done)
    request = cache.open(range(100, 106))
    _run(cache, request, 6)
    waiting = cache.open(range(200, 209))
    cache.preempt(waiting)
    drawn = _print(inspect.pool_text(cache)).splitlines()
    assert drawn[:3] == ["pages 0-5", "  shard 0   x+a...", "  shard 1   x+A..."]
    assert "A a  request 1: 2 pages, 1 private" in drawn
    assert "B b  request 2: 0 pages, preempted" in drawn
    folded = _print(inspect.pool_text(cache, columns=4)).splitlines()
    assert folded[0] == "pages 0-3"
    assert folded[3:6] == ["pages 4-5", "  shard 0   ..", "  shard 1   .."]
    with pytest.raises(ValueError, match="columns=0"):
        inspect.pool_text(cache, columns=0)


@pytest.mark.parametrize("pages_per_shard", [16, 200])
def test_pool_figure_colours_one_cell_a_page(pages_per_shard, tmp_path):
    cache, _ = _make_busy_cache(pages_per_shard=pages_per_shard)
    figure = inspect.pool_figure(cache)
    (axes,) = figure.axes
    (mesh,) = axes.collections
    assert mesh.get_array().shape[:2] == (4, pages_per_shard)
    colors = mesh.get_array().reshape(-1, 3)
    pool = inspect.pool_map(cache)
    kinds = set(zip(pool.states.flat, pool.request_ids.flat, strict=True))
    assert len(np.unique(colors, axis=0)) == len(kinds)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "B request 2" in labels
    if pages_per_shard == 16:
        letters = [text.get_text() for text in axes.texts]
        assert letters.count("A") == 2
        assert letters.count("a") == 7
    figure.savefig(tmp_path / "pool.png", dpi=40)


# plans


def _expected_reads(cache, step):
    """Who reads each page, by looking at the chains."""
    readers = {}
    for index, request in enumerate(step.requests):
        num_pages = -(-request.num_computed // 4)
        for page in request.pages()[:num_pages].tolist():
            readers.setdefault(divmod(page, cache.num_shards)[::-1], []).append(index)
    return {page: tuple(indices) for page, indices in readers.items()}


@pytest.mark.parametrize("shard_tokens", [False, True])
@pytest.mark.parametrize("mode", ["assembled", "striped"])
@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_a_plan_reads_the_prefix_pages_and_writes_the_new_slots(
    num_shards, mode, shard_tokens
):
    cache, step = _make_busy_cache(
        num_shards=num_shards, mode=mode, pages_per_shard=60, shard_tokens=shard_tokens
    )
    plan = inspect.plan_map(step)
    assert (plan.mode, plan.num_shards, plan.page_size) == (mode, num_shards, 4)
    assert plan.num_rounds == (mode == "assembled")
    assert plan.prefix_lens == (30, 34, 18)
    assert plan.counts == (3, 20, 1)
    assert plan.request_ids == tuple(request.id for request in step.requests)
    read = {(each.owner, each.physical_page): each.sequences for each in plan.reads}
    assert len(read) == len(plan.reads)
    assert read == _expected_reads(cache, step)
    for each in plan.reads:
        if mode == "striped":
            assert each.scratch_page == -1
            continue
        logical = each.physical_page * num_shards + each.owner
        rows = step.translate(np.array([logical * 4]))
        assert rows.tolist() == [each.scratch_page * 4]
    written = sorted(
        (each.sequence, each.owner, each.physical_page, slot)
        for each in plan.writes
        for slot in range(each.first_slot, each.first_slot + each.num_slots)
    )
    expected = []
    for index, request in enumerate(step.requests):
        start = request.num_computed
        for position in range(start, start + int(step.counts[index])):
            page = int(request.pages()[position // 4])
            place = page % num_shards, page // num_shards, position % 4
            expected.append((index, *place))
    assert written == sorted(expected)


def test_a_plan_of_several_rounds_sends_each_page_in_its_round():
    cache, step = _make_busy_cache(max_prefix_tokens=48)
    plan = inspect.plan_map(step)
    assert (plan.num_rounds, plan.block) == (4, 3)
    assert plan.round_starts == (0, 16, 32, 48)
    for read in plan.reads:
        assert read.scratch_page // plan.block == read.owner
        logical = read.physical_page * 4 + read.owner
        for index in read.sequences:
            place = step.requests[index].pages().tolist().index(logical)
            assert place * 4 // 16 == read.round
    read = {(each.owner, each.physical_page): each.sequences for each in plan.reads}
    assert read == _expected_reads(cache, step)
    drawn = _print(inspect.plan_text(step))
    assert "gather 4 of 4: prefixes from token 48 on, 3 pages a shard" in drawn
    assert len(inspect.plan_figure(step).axes) == 5


def test_a_first_chunk_reads_nothing():
    cache = _make_cache(2)
    step = cache.plan([(cache.open(range(6)), 6)])
    plan = inspect.plan_map(step)
    assert plan.reads == ()
    assert plan.writes == (PageWrite(0, 1, 0, 4, 0), PageWrite(1, 1, 0, 2, 0))
    assert len(inspect.plan_figure(step).axes) == 2


def test_a_step_can_still_be_shown_when_it_is_over():
    cache, step = _make_busy_cache()
    before = inspect.plan_map(step)
    cache.commit(step, cache.pool)
    for request in step.requests:
        cache.close(request)
    assert inspect.plan_map(step) == before


@pytest.mark.parametrize("draw", [inspect.plan_text, inspect.plan_figure])
def test_a_warm_up_step_has_nothing_to_show(draw):
    step = next(_make_cache(2).warmup_steps())
    with pytest.raises(ValueError, match="warm-up"):
        draw(step)


@pytest.mark.parametrize(
    ("mode", "title", "first"),
    [
        ("assembled", "gather 1 of 1", "  shard 0    4>0 AB  5>1 A  6>2 B  7>3 C"),
        ("striped", "reads in place", "  shard 0    4 AB  5 A  6 B  7 C"),
    ],
)
def test_plan_text_names_pages_slots_and_requests(mode, title, first):
    _, step = _make_busy_cache(mode=mode)
    drawn = _print(inspect.plan_text(step)).splitlines()
    assert drawn[0] == f"{mode} step"
    assert drawn[1].strip() == "A  request 1: 3 new tokens after 30"
    assert drawn[4].startswith(title)
    assert drawn[5] == first
    assert "  shard 1    5[2:4] A  8[0:4] B" in drawn


@pytest.mark.parametrize("mode", ["assembled", "striped"])
def test_plan_figure_draws_each_read_and_write(mode, tmp_path):
    _, step = _make_busy_cache(mode=mode)
    plan = inspect.plan_map(step)
    figure = inspect.plan_figure(step)
    reads, writes = figure.axes
    labels = [text.get_text() for text in reads.texts]
    assert len(labels) == len(plan.reads)
    assert labels.count("4 AB") == 4
    assert len(writes.texts) == len(plan.writes)
    # a page is an outline and what of it is filled
    assert len(writes.patches) == 2 * len(plan.writes)
    widths = [
        patch.get_extents().transformed(writes.transData.inverted()).width
        for patch in writes.patches
    ]
    assert sorted(width for width in widths if width < 0.9) == pytest.approx(
        [0.23, 0.23, 0.46, 0.46, 0.46]
    )
    figure.savefig(tmp_path / "plan.png", dpi=40)


# optional packages


@pytest.mark.parametrize("kind", ["pool", "plan"])
@pytest.mark.parametrize(
    ("package", "picture"), [("rich", "text"), ("matplotlib", "figure")]
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, kind, package, picture):
    cache, step = _make_busy_cache()

    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    draw = getattr(inspect, f"{kind}_{picture}")
    with pytest.raises(ImportError, match=rf"needs {package}.*jaxkv\[examples\]"):
        draw(cache if kind == "pool" else step)


def test_importing_it_takes_only_core_dependencies():
    command = (
        "import sys, jaxkv.inspect; "
        "print([m for m in ('rich', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
