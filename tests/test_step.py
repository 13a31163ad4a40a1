"""Scratch rows of locs, against a model that fills the scratch slot by slot."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.host.allocator import PageAllocator
from jaxkv.host.buckets import Buckets
from jaxkv.host.planner import Mode, Planner
from jaxkv.host.request import Request, RequestTable
from jaxkv.host.step import ScratchMap, Step

PAGES_PER_SHARD = 40


class _Host:
    """A table whose chains are random pages of an allocator."""

    def __init__(self, num_shards: int, page_size: int, seed: int = 0):
        self.table = RequestTable(num_shards, page_size)
        self.allocator = PageAllocator(num_shards, PAGES_PER_SHARD)
        pages = self.allocator.allocate(self.allocator.usable_pages, 0)
        assert pages is not None
        self.allocator.free(np.random.default_rng(seed).permutation(pages))

    @property
    def num_locs(self) -> int:
        return self.table.num_shards * PAGES_PER_SHARD * self.table.page_size

    def open(
        self,
        prefix_len: int,
        num_new: int,
        *,
        base: int = 0,
        source: Request | None = None,
        num_shared: int = 0,
    ) -> Request:
        """A request with its pages, the first of them shared with another."""
        table, num_shards = self.table, self.table.num_shards
        request = table.open(np.zeros(prefix_len + num_new, np.int32))
        if source is not None:
            shared = source.pages()[:num_shared]
            self.allocator.share(shared)
            table.extend_chain(request, shared)
        num_pages = -(-(prefix_len + num_new) // table.page_size)
        first = request.pages()[-1] + 1 if request.num_pages else base
        pages = self.allocator.allocate(
            num_pages - request.num_pages, int(first) % num_shards
        )
        assert pages is not None
        table.extend_chain(request, pages)
        table.advance([request], np.array([prefix_len]))
        return request


def _make_step(
    host: _Host,
    batch: list[tuple[Request, int]],
    *,
    mode: Mode = "assembled",
    sharded: bool = False,
    blocks: tuple[int, ...] = tuple(range(1, 60)),
) -> Step:
    planner = Planner(
        table=host.table,
        buckets=Buckets(
            tokens=(8, 64, 256),
            sequences=(1, 8),
            table_widths=(1, 4, 16),
            blocks=blocks,
            rounds=(1, 2, 8),
        ),
        pages_per_shard=PAGES_PER_SHARD,
        num_token_blocks=host.table.num_shards if sharded else 1,
        mode=mode,
        queries_per_kv_head=1.0,
    )
    requests = tuple(request for request, _ in batch)
    counts = np.array([count for _, count in batch], np.int32)
    shape = planner.shape(np.array([r.slot for r in requests], np.int32), counts)
    assert shape is not None
    scratch = None
    if shape.num_rounds == 1:
        scratch = planner.scratch_map(requests, counts, shape)
    plan = planner.build(requests, counts, shape)
    return Step(
        plan=None,
        arrays=plan,
        requests=requests,
        counts=counts,
        epochs=tuple(request.epoch for request in requests),
        shape=shape,
        version=0,
        scratch=scratch,
    )


def _make_map(**changes) -> ScratchMap:
    """Two shards of two-token pages; a chain of 3 tokens grows by 2.

    Pages 6 (full), 3 (half of it prefix, half chunk) and 4 (one slot of the chunk).
    """
    return ScratchMap(
        **{
            "num_shards": 2,
            "page_size": 2,
            "block": 2,
            "num_tokens": 4,
            "prefix_pages": np.array([6, 3]),
            "prefix_slots": np.array([2, 1]),
            "chunk_locs": np.array([7, 8]),
        }
        | changes
    )


def _rows_of_locs(host: _Host, step: Step) -> dict[int, int]:
    """Scratch rows by loc, read off the plan's arrays slot by slot."""
    plan, page_size = step.arrays, host.table.page_size
    num_shards, _, block = plan.send_pages.shape
    rows = {}
    chunk_start = num_shards * block * page_size
    chunk_row = 0
    for index, (request, count) in enumerate(
        zip(step.requests, step.counts.tolist(), strict=True)
    ):
        pages = request.pages().tolist()
        for position in range(request.num_computed + count):
            page, offset = divmod(position, page_size)
            loc = pages[page] * page_size + offset
            if position < request.num_computed:
                scratch_page = int(plan.page_table[0, index, page])
                rows[loc] = scratch_page * page_size + offset
            else:
                assert loc not in rows
                rows[loc] = chunk_start + chunk_row
                chunk_row += 1
    return rows


def test_regions_of_the_scratch():
    scratch = _make_map()
    assert scratch.chunk_start == 2 * 2 * 2
    assert scratch.trash_start == 8 + 4
    assert scratch.num_rows == 12 + 2


@pytest.mark.parametrize(
    ("loc", "row"),
    [
        (12, 0),  # page 6, first of owner 0
        (13, 1),
        (6, 4),  # page 3, first of owner 1
        (7, 8),  # the same page's new slot is the first chunk row
        (8, 9),
        (9, 13),  # a slot that the step does not write
        (0, 12),  # reserved pages
        (1, 13),
        (3, 13),
        (10, 12),  # another request's page
        (14, 12),
        (2**40 + 1, 13),
    ],
)
def test_each_kind_of_loc(loc, row):
    assert _make_map().translate(np.array([loc])).tolist() == [row]


def test_send_order_is_by_owner_then_page_whatever_the_block():
    scratch = _make_map(
        block=3,
        prefix_pages=np.array([4, 8, 14, 3, 9]),
        prefix_slots=np.array([2, 2, 2, 2, 1]),
        chunk_locs=np.array([], np.int32),
    )
    locs = np.array([8, 9, 16, 28, 29, 6, 18, 19])
    assert scratch.translate(locs).tolist() == [0, 1, 2, 4, 5, 6, 8, 17]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 4), (2, 1, 3)])
def test_rows_have_the_shape_of_the_locs(shape):
    locs = np.full(shape, 6)
    rows = _make_map().translate(locs)
    assert rows.shape == shape
    assert rows.dtype == np.int32
    assert (rows == 4).all()


def test_lists_and_repeated_locs_in_any_order():
    rows = _make_map().translate([8, 12, 8, 0, 6, 12])  # pyright: ignore[reportArgumentType]
    assert rows.tolist() == [9, 0, 9, 12, 4, 0]


@pytest.mark.parametrize("locs", [[-1], [6, -7, 8], [[12], [-1]]])
def test_negative_locs_are_refused(locs):
    with pytest.raises(ValueError, match=rf"loc {np.min(locs)} must be at least 0"):
        _make_map().translate(np.array(locs))


def test_a_step_without_prefix_has_chunk_and_trash_only():
    host = _Host(2, 2)
    request = host.open(0, 3, base=1)
    step = _make_step(host, [(request, 3)])
    assert step.mode == "assembled"
    assert step.scratch is not None
    assert step.scratch.chunk_start == 0
    assert step.scratch.trash_start == 8
    first, second = request.pages().tolist()
    locs = [2 * first, 2 * first + 1, 2 * second, 2 * second + 1, 0]
    assert step.translate(np.array(locs)).tolist() == [0, 1, 2, 9, 8]


def test_a_page_that_prefix_and_chunk_share_is_split_between_them():
    host = _Host(2, 4)
    request = host.open(6, 9, base=1)
    step = _make_step(host, [(request, 4)])
    assert step.scratch is not None
    pages = request.pages()
    chunk, trash = step.scratch.chunk_start, step.scratch.trash_start
    assert (chunk, trash) == (2 * 1 * 4, 2 * 1 * 4 + 8)
    assert step.translate(pages[:3, None] * 4 + np.arange(4)).tolist() == [
        [4, 5, 6, 7],
        [0, 1, chunk, chunk + 1],
        [chunk + 2, chunk + 3, trash + 2, trash + 3],
    ]


def test_a_shared_page_has_one_row_for_all_its_readers():
    host = _Host(2, 2)
    source = host.open(4, 1)
    fork = host.open(5, 2, source=source, num_shared=2)
    step = _make_step(host, [(fork, 2), (source, 1)])
    assert step.scratch is not None
    assert step.scratch.prefix_pages.size == 3
    locs = source.pages()[:2, None] * 2 + np.arange(2)
    assert len(set(step.translate(locs).flat)) == 4
    np.testing.assert_array_equal(
        step.translate(locs), step.translate(fork.pages()[:2, None] * 2 + np.arange(2))
    )


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_loc_of_the_pool_translates_as_the_plan_reads_it(sharded, data):
    host = _Host(
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(0, 99)),
    )
    page_size = host.table.page_size
    rotation = host.table.num_shards * page_size
    requests = []
    for _ in range(data.draw(st.integers(1, 4))):
        source = data.draw(st.sampled_from([None, *requests]))
        num_full = 0 if source is None else source.num_computed // page_size
        num_shared = data.draw(st.integers(0, num_full))
        extra = data.draw(st.integers(0, 2 * rotation))
        requests.append(
            host.open(
                num_shared * page_size + extra,
                data.draw(st.integers(1, rotation + 1)),
                base=data.draw(st.integers(0, host.table.num_shards - 1)),
                source=source,
                num_shared=num_shared,
            )
        )
    batch = [
        (request, data.draw(st.integers(1, request.num_uncomputed)))
        for request in data.draw(st.permutations(requests))
        if data.draw(st.booleans())
    ] or [(requests[0], 1)]
    step = _make_step(host, batch, sharded=sharded)
    assert step.scratch is not None
    trash = step.scratch.trash_start
    assert step.scratch.num_tokens == step.arrays.tokens.size
    expected = [trash + loc % page_size for loc in range(host.num_locs)]
    rows = _rows_of_locs(host, step)
    for loc, row in rows.items():
        expected[loc] = row
    assert len(set(rows.values())) == len(rows)
    assert max(rows.values()) < trash
    assert step.translate(np.arange(host.num_locs)).tolist() == expected


def test_a_striped_step_has_no_scratch_to_translate_to():
    host = _Host(2, 2)
    step = _make_step(host, [(host.open(4, 2), 2)], mode="striped")
    assert step.mode == "striped"
    with pytest.raises(ValueError, match="striped step of 0 rounds has no single"):
        step.translate(np.array([8]))


def test_a_step_of_several_rounds_has_no_single_scratch():
    host = _Host(2, 2)
    step = _make_step(host, [(host.open(16, 2), 2)], blocks=(2,))
    assert step.mode == "assembled"
    assert step.shape.num_rounds == 2
    with pytest.raises(ValueError, match="assembled step of 2 rounds has no single"):
        step.translate(np.array([8]))
