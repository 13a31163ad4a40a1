"""Plans against a model that walks every token in Python, and worked examples."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.host.allocator import PageAllocator
from jaxkv.host.buckets import Buckets, StepShape
from jaxkv.host.planner import Mode, Planner, reads_striped
from jaxkv.host.request import Request, RequestTable
from jaxkv.placement import gather_ranges
from jaxkv.plan import StepPlan

PAGES_PER_SHARD = 80


@dataclasses.dataclass
class _Sequence:
    """What the model knows of a request; pages are logical, in position order."""

    request: Request
    tokens: list[int]
    computed: int
    pages: list[int]


class _Host:
    """A table and an allocator, and one record of the model a request."""

    def __init__(self, num_shards: int, page_size: int, seed: int = 0):
        self.num_shards = num_shards
        self.page_size = page_size
        self.table = RequestTable(num_shards, page_size)
        self.allocator = PageAllocator(num_shards, PAGES_PER_SHARD)
        pages = self.allocator.allocate(self.allocator.usable_pages, 0)
        assert pages is not None
        self.allocator.free(np.random.default_rng(seed).permutation(pages))

    def open(self, tokens: list[int]) -> _Sequence:
        request = self.table.open(np.array(tokens, np.int32))
        return _Sequence(request, tokens, 0, [])

    def share(self, source: _Sequence, sequence: _Sequence, num_pages: int) -> None:
        """Gives a new sequence the first full pages of another."""
        pages = source.pages[:num_pages]
        self.allocator.share(np.array(pages, np.int32))
        self.table.extend_chain(sequence.request, np.array(pages, np.int32))
        sequence.pages = list(pages)

    def grow(self, sequence: _Sequence, num_tokens: int, base: int) -> None:
        """Draws the pages that a chain of so many tokens lacks."""
        missing = -(-num_tokens // self.page_size) - len(sequence.pages)
        if missing <= 0:
            return
        first = sequence.pages[-1] + 1 if sequence.pages else base
        pages = self.allocator.allocate(missing, first % self.num_shards)
        assert pages is not None
        self.table.extend_chain(sequence.request, pages)
        sequence.pages += pages.tolist()

    def compute(self, sequence: _Sequence, num_tokens: int) -> None:
        """Counts the next tokens as computed."""
        self.table.advance([sequence.request], np.array([num_tokens], np.int32))
        sequence.computed += num_tokens

    def append(self, sequence: _Sequence, tokens: list[int]) -> None:
        self.table.append(sequence.request, np.array(tokens, np.int32))
        sequence.tokens = sequence.tokens + tokens


def _make_host(num_shards: int = 4, page_size: int = 4) -> _Host:
    return _Host(num_shards, page_size)


def _make_sequence(
    host: _Host, prefix_len: int, num_new: int, base: int = 0
) -> _Sequence:
    """A request with its pages; tokens count up from 100 times its id."""
    first = 100 * len(host.table.requests)
    sequence = host.open(list(range(first, first + prefix_len + num_new)))
    host.grow(sequence, prefix_len + num_new, base)
    host.compute(sequence, prefix_len)
    return sequence


def _make_fork(
    host: _Host, source: _Sequence, num_pages: int, prefix_len: int, num_new: int
) -> _Sequence:
    """A request that shares another's first full pages."""
    shared = num_pages * host.page_size
    assert shared <= min(source.computed, prefix_len)
    tokens = source.tokens[:shared]
    tokens = tokens + [500 + index for index in range(prefix_len + num_new - shared)]
    sequence = host.open(tokens)
    host.share(source, sequence, num_pages)
    host.grow(sequence, prefix_len + num_new, 0)
    host.compute(sequence, prefix_len)
    return sequence


def _make_buckets(**changes) -> Buckets:
    """Every size up to a bound, so that static sizes are exact."""
    return Buckets(
        **{
            "tokens": tuple(range(1, 301)),
            "sequences": tuple(range(1, 9)),
            "table_widths": tuple(range(1, 31)),
            "blocks": tuple(range(1, 101)),
            "rounds": (1,),
        }
        | changes
    )


def _make_planner(
    host: _Host,
    buckets: Buckets | None = None,
    mode: Mode = "assembled",
    *,
    sharded: bool = False,
    queries_per_kv_head: float = 4.0,
) -> Planner:
    return Planner(
        table=host.table,
        buckets=buckets or _make_buckets(),
        pages_per_shard=PAGES_PER_SHARD,
        num_token_blocks=host.num_shards if sharded else 1,
        mode=mode,
        queries_per_kv_head=queries_per_kv_head,
    )


type _Batch = list[tuple[_Sequence, int]]


def _shape(planner: Planner, batch: _Batch) -> StepShape | None:
    slots = np.array([sequence.request.slot for sequence, _ in batch], np.int32)
    counts = np.array([count for _, count in batch], np.int32)
    return planner.shape(slots, counts)


def _build(planner: Planner, batch: _Batch, shape: StepShape) -> StepPlan:
    requests = [sequence.request for sequence, _ in batch]
    counts = np.array([count for _, count in batch], np.int32)
    return planner.build(requests, counts, shape)


def _plan(planner: Planner, batch: _Batch) -> StepPlan:
    shape = _shape(planner, batch)
    assert shape is not None
    return _build(planner, batch, shape)


def _assert_equal(plan: StepPlan, **fields) -> None:
    for name, value in fields.items():
        assert getattr(plan, name).tolist() == value, name


def _fitting(size: int, sizes: Iterable[int]) -> float:
    """The smallest size that holds another; infinite where none does."""
    return min((declared for declared in sizes if declared >= size), default=math.inf)


def _prefix_pages(sequence: _Sequence, page_size: int) -> list[int]:
    return sequence.pages[: -(-sequence.computed // page_size)]


def _most_distinct(host: _Host, batch: _Batch) -> int:
    """The most distinct prefix pages of any owner."""
    distinct = {
        page
        for sequence, _ in batch
        for page in _prefix_pages(sequence, host.page_size)
    }
    owners = [page % host.num_shards for page in distinct]
    return max(owners.count(shard) for shard in range(host.num_shards))


def _fullest_block(host: _Host, batch: _Batch, bases: dict[int, int]) -> int:
    """The most new tokens of any owner, for given bases of chains without pages."""
    owned = [0] * host.num_shards
    for sequence, count in batch:
        base = bases.get(sequence.request.id)
        if base is None:
            base = sequence.pages[0]
        for position in range(sequence.computed, sequence.computed + count):
            owned[(base + position // host.page_size) % host.num_shards] += 1
    return max(owned)


def _worst_block(planner: Planner, host: _Host, batch: _Batch) -> int:
    """The most new tokens of a token block, for the worst bases not drawn yet."""
    if planner.num_token_blocks == 1:
        return sum(count for _, count in batch)
    empty = [sequence.request.id for sequence, _ in batch if not sequence.pages]
    return max(
        _fullest_block(host, batch, dict(zip(empty, bases, strict=True)))
        for bases in itertools.product(range(host.num_shards), repeat=len(empty))
    )


def _gather_size(planner: Planner, host: _Host, batch: _Batch) -> tuple[float, float]:
    """The block and the rounds by the documented rule; infinite where none fits."""
    blocks, rounds = planner.buckets.blocks, planner.buckets.rounds
    distinct = _most_distinct(host, batch)
    if not distinct:
        return 0, 1
    if distinct <= blocks[-1]:
        return _fitting(distinct, blocks), 1
    num_pages = [len(_prefix_pages(sequence, host.page_size)) for sequence, _ in batch]
    rotations = blocks[-1] // len([pages for pages in num_pages if pages])
    if not rotations:
        return math.inf, math.inf
    needed = -(-max(num_pages) // (rotations * host.num_shards))
    return blocks[-1], _fitting(needed, rounds)


def _reads_striped(planner: Planner, host: _Host, batch: _Batch) -> bool:
    if planner.mode != "auto":
        return planner.mode == "striped"
    num_new_tokens = sum(count for _, count in batch)
    if num_new_tokens == len(batch):
        return True
    if _most_distinct(host, batch) > planner.buckets.blocks[-1]:
        return True
    block, _ = _gather_size(planner, host, batch)
    gathered = block * host.num_shards * host.page_size
    return gathered > num_new_tokens * planner.queries_per_kv_head


def _check_shape(planner: Planner, host: _Host, batch: _Batch) -> StepShape | None:
    """The planner's static sizes, held against sizes counted token by token."""
    shape, buckets = _shape(planner, batch), planner.buckets
    blocks = planner.num_token_blocks
    longest = max(len(_prefix_pages(s, host.page_size)) for s, _ in batch)
    share = _fitting(
        _worst_block(planner, host, batch),
        [-(-tokens // blocks) for tokens in buckets.tokens],
    )
    block, num_rounds = 0, 0
    if not _reads_striped(planner, host, batch):
        block, num_rounds = _gather_size(planner, host, batch)
    expected = (
        share * blocks,
        _fitting(len(batch), buckets.sequences),
        _fitting(-(-longest // host.num_shards), buckets.table_widths),
        num_rounds,
        block,
        blocks,
    )
    assert shape == (None if math.inf in expected else expected)
    return shape


def _check_tokens(plan: StepPlan, shape: StepShape, host: _Host, batch: _Batch) -> None:
    """Which token lies at which row, and where each new token's row is."""
    share = shape.num_tokens // shape.num_token_blocks
    rows_used = [0] * shape.num_token_blocks
    rows: dict[int, tuple[int, int, int]] = {}
    cu_q_lens, chunk_rows, last_rows = [0], [], []
    for index, (sequence, count) in enumerate(batch):
        for position in range(sequence.computed, sequence.computed + count):
            owner = sequence.pages[position // host.page_size] % host.num_shards
            block = 0 if shape.num_token_blocks == 1 else owner
            row = block * share + rows_used[block]
            rows_used[block] += 1
            rows[row] = sequence.tokens[position], position, index
            chunk_rows.append(row)
        cu_q_lens.append(len(chunk_rows))
        last_rows.append(chunk_rows[-1])
    assert max(rows_used) <= share
    padded = [rows.get(row, (0, 0, 0)) for row in range(shape.num_tokens)]
    spare = shape.num_sequences - len(batch)
    _assert_equal(
        plan,
        tokens=[token for token, _, _ in padded],
        positions=[position for _, position, _ in padded],
        seq_ids=[index for _, _, index in padded],
        num_rows=rows_used,
        cu_q_lens=cu_q_lens + [len(chunk_rows)] * spare,
        chunk_rows=chunk_rows + [0] * (shape.num_tokens - len(chunk_rows)),
        last_rows=last_rows + [0] * spare,
        prefix_lens=[sequence.computed for sequence, _ in batch] + [0] * spare,
        bases=[s.pages[0] % host.num_shards for s, _ in batch] + [0] * spare,
    )


def _check_writes(plan: StepPlan, shape: StepShape, host: _Host, batch: _Batch) -> None:
    """Which of its rows each owner writes, and to which pool row."""
    share = shape.num_tokens // shape.num_token_blocks
    num_rows = PAGES_PER_SHARD * host.page_size
    written = set()
    for shard in range(host.num_shards):
        stage_rows, write_rows, lens = [], [], [0]
        chunk_row = 0
        for sequence, count in batch:
            for position in range(sequence.computed, sequence.computed + count):
                page = sequence.pages[position // host.page_size]
                offset = position % host.page_size
                if page % host.num_shards == shard:
                    row = plan.chunk_rows[chunk_row]
                    if shape.num_token_blocks > 1:
                        row -= shard * share
                    stage_rows.append(row)
                    write_rows.append(page // host.num_shards * host.page_size + offset)
                    written.add((shard, write_rows[-1]))
                chunk_row += 1
            lens.append(len(stage_rows))
        spare = plan.stage_rows.shape[1] - len(stage_rows)
        assert spare >= 0
        assert all(0 <= row < share for row in stage_rows)
        assert all(host.page_size <= row < num_rows for row in write_rows)
        assert plan.stage_rows[shard].tolist() == stage_rows + [0] * spare
        real = len(write_rows)
        assert plan.write_rows[shard, :real].tolist() == write_rows
        assert (plan.write_rows[shard, real:] >= num_rows).all()
        padding = [len(stage_rows)] * (shape.num_sequences - len(batch))
        assert plan.stage_cu_lens[shard].tolist() == lens + padding
    assert len(written) == sum(count for _, count in batch)
    if shape.num_token_blocks > 1:
        assert plan.stage_rows.shape[1] == share


def _check_striped(
    plan: StepPlan, shape: StepShape, host: _Host, batch: _Batch
) -> None:
    """Every prefix key is found by its index on its owner."""
    assert plan.is_striped
    assert plan.page_table.shape == (
        host.num_shards,
        shape.num_sequences,
        shape.table_width,
    )
    assert plan.send_pages.shape == (host.num_shards, 0, 0)
    assert plan.round_starts.tolist() == [0]
    assert ((plan.page_table >= 0) & (plan.page_table < PAGES_PER_SHARD)).all()
    assert not plan.page_table[:, len(batch) :].any()
    for index, (sequence, _) in enumerate(batch):
        local = [0] * host.num_shards
        for position in range(sequence.computed):
            page = sequence.pages[position // host.page_size]
            owner, physical = page % host.num_shards, page // host.num_shards
            entry, offset = divmod(local[owner], host.page_size)
            assert plan.page_table[owner, index, entry] == physical
            assert offset == position % host.page_size
            local[owner] += 1


def _check_assembled(
    plan: StepPlan, shape: StepShape, host: _Host, batch: _Batch
) -> None:
    """Each round sends its pages once, and every prefix key is found in one round."""
    num_shards, page_size = host.num_shards, host.page_size
    rounds, block = shape.num_rounds, shape.block
    assert not plan.is_striped
    assert plan.page_table.shape == (
        rounds,
        shape.num_sequences,
        num_shards * shape.table_width,
    )
    assert plan.send_pages.shape == (num_shards, rounds, block)
    starts = plan.round_starts.tolist()
    assert len(starts) == rounds + 1
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert starts[-1] >= max(sequence.computed for sequence, _ in batch)
    assert all(start % (num_shards * page_size) == 0 for start in starts)
    for number in range(rounds):
        start, stop = starts[number], starts[number + 1]
        scratch = [
            (shard, int(page))
            for shard in range(num_shards)
            for page in plan.send_pages[shard, number]
        ]
        wanted = set()
        table = np.zeros(plan.page_table.shape[1:], int)
        for index, (sequence, _) in enumerate(batch):
            for position in range(start, min(stop, sequence.computed)):
                page = sequence.pages[position // page_size]
                home = page % num_shards, page // num_shards
                wanted.add(home)
                table[index, (position - start) // page_size] = scratch.index(home)
        assert plan.page_table[number].tolist() == table.tolist()
        for shard in range(num_shards):
            pages = sorted(page for owner, page in wanted if owner == shard)
            pages += [0] * (block - len(pages))
            assert plan.send_pages[shard, number].tolist() == pages


def _check_plan(plan: StepPlan, shape: StepShape, host: _Host, batch: _Batch) -> None:
    assert all(field.dtype == np.int32 for field in plan)
    assert plan.num_token_blocks == shape.num_token_blocks
    assert plan.num_rounds == shape.num_rounds
    assert plan.block == shape.block
    _check_tokens(plan, shape, host, batch)
    _check_writes(plan, shape, host, batch)
    if shape.num_rounds == 0:
        _check_striped(plan, shape, host, batch)
    else:
        _check_assembled(plan, shape, host, batch)


def _sizes(largest: int):
    return st.one_of(
        st.just(tuple(range(1, largest + 1))),
        st.sets(st.integers(1, largest), min_size=1, max_size=4).map(
            lambda sizes: tuple(sorted({*sizes, largest}))
        ),
    )


@st.composite
def _buckets(draw):
    return Buckets(
        tokens=draw(_sizes(draw(st.sampled_from([6, 40, 160])))),
        sequences=draw(_sizes(draw(st.sampled_from([3, 5])))),
        table_widths=draw(_sizes(draw(st.sampled_from([2, 12])))),
        blocks=draw(_sizes(draw(st.sampled_from([1, 2, 3, 5, 20])))),
        rounds=draw(st.sampled_from([(1,), (1, 2), (1, 4), tuple(range(1, 13))])),
    )


@st.composite
def _hosts(draw) -> tuple[_Host, list[_Sequence]]:
    """Up to five requests, some with a prefix, some of which share full pages."""
    host = _Host(
        draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(0, 99))
    )
    rotation = host.num_shards * host.page_size
    sequences: list[_Sequence] = []
    for number in range(draw(st.integers(1, 5))):
        tokens, num_shared = [], 0
        source = draw(st.sampled_from([None, *sequences]))
        if source is not None:
            num_shared = draw(st.integers(0, source.computed // host.page_size))
            tokens = source.tokens[: num_shared * host.page_size]
        extra = draw(st.one_of(st.just(0), st.integers(0, 2 * rotation)))
        fresh = range(len(tokens) + extra + draw(st.integers(1, rotation + 2)))
        tokens = tokens + [1000 * number + index for index in fresh[len(tokens) :]]
        sequence = host.open(tokens)
        if source is not None:
            host.share(source, sequence, num_shared)
        prefix_len = num_shared * host.page_size + extra
        host.grow(sequence, prefix_len, draw(st.integers(0, host.num_shards - 1)))
        host.compute(sequence, prefix_len)
        sequences.append(sequence)
    return host, sequences


@st.composite
def _batches(draw, sequences: list[_Sequence]) -> _Batch:
    """Some requests in some order: decode steps, chunks and whole prompts."""
    chosen = draw(st.permutations(sequences))
    chosen = chosen[: draw(st.integers(1, len(chosen)))]
    decodes_only = draw(st.integers(0, 4)) == 0
    batch = []
    for sequence in chosen:
        most = 1 if decodes_only else len(sequence.tokens) - sequence.computed
        batch.append((sequence, draw(st.one_of(st.just(1), st.integers(1, most)))))
    return batch


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("mode", ["striped", "assembled", "auto"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_plans_agree_with_the_model_over_several_steps(mode, sharded, data):
    host, sequences = data.draw(_hosts())
    planner = _make_planner(
        host,
        data.draw(_buckets()),
        mode,
        sharded=sharded,
        queries_per_kv_head=data.draw(st.sampled_from([1.0, 4.0])),
    )
    for _ in range(3):
        batch = data.draw(_batches(sequences))
        shape = _check_shape(planner, host, batch)
        for sequence, count in batch:
            base = data.draw(st.integers(0, host.num_shards - 1))
            host.grow(sequence, sequence.computed + count, base)
        if shape is None:
            continue
        plan = _build(planner, batch, shape)
        _check_plan(plan, shape, host, batch)
        again = _build(planner, batch, shape)
        assert all(np.array_equal(*pair) for pair in zip(plan, again, strict=True))
        for sequence, count in batch:
            host.compute(sequence, count)
            if sequence.computed == len(sequence.tokens):
                host.append(
                    sequence, data.draw(st.lists(st.integers(0, 9), min_size=1))
                )


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_prefixes_larger_than_the_scratch_come_in_rounds(sharded, data):
    host, sequences = data.draw(_hosts())
    batch = data.draw(_batches(sequences))
    num_prefixes = sum(sequence.computed > 0 for sequence, _ in batch)
    most = max(_most_distinct(host, batch), num_prefixes, 1)
    block = data.draw(st.integers(max(num_prefixes, 1), most))
    buckets = _make_buckets(blocks=(block,), rounds=tuple(range(1, 20)))
    planner = _make_planner(host, buckets, sharded=sharded)
    shape = _check_shape(planner, host, batch)
    assert shape is not None
    for sequence, count in batch:
        host.grow(sequence, sequence.computed + count, 0)
    _check_plan(_build(planner, batch, shape), shape, host, batch)


def _make_two_sequences():
    """Owners of two shards, pages of two tokens; A has base 0 and B base 1.

    A: prefix 3 of 5 tokens on logical pages 6, 3, 4; B: prefix 1 of 2 on page 5.
    """
    host = _make_host(num_shards=2, page_size=2)
    batch = []
    for tokens, pages, prefix_len, count in (
        ([10, 11, 12, 13, 14], [6, 3, 4], 3, 2),
        ([20, 21], [5], 1, 1),
    ):
        sequence = host.open(tokens)
        host.table.extend_chain(sequence.request, np.array(pages))
        sequence.pages = pages
        host.compute(sequence, prefix_len)
        batch.append((sequence, count))
    buckets = _make_buckets(tokens=(4,), sequences=(3,), table_widths=(2,))
    return host, batch, buckets


OUT = PAGES_PER_SHARD * 2


def test_exact_arrays_of_a_striped_plan():
    host, batch, buckets = _make_two_sequences()
    plan = _plan(_make_planner(host, buckets, "striped"), batch)
    _assert_equal(
        plan,
        tokens=[13, 14, 21, 0],
        positions=[3, 4, 1, 0],
        seq_ids=[0, 0, 1, 0],
        num_rows=[3],
        cu_q_lens=[0, 2, 3, 3],
        chunk_rows=[0, 1, 2, 0],
        last_rows=[1, 2, 0],
        prefix_lens=[3, 1, 0],
        bases=[0, 1, 0],
        page_table=[[[3, 2], [0, 0], [0, 0]], [[1, 0], [2, 0], [0, 0]]],
        round_starts=[0],
        send_pages=[[], []],
        stage_rows=[[1, 0, 0, 0], [0, 2, 0, 0]],
        stage_cu_lens=[[0, 1, 1, 1], [0, 1, 2, 2]],
        write_rows=[[4, OUT, OUT, OUT], [3, 5, OUT, OUT]],
    )


def test_exact_arrays_of_an_assembled_plan_with_sharded_tokens():
    host, batch, buckets = _make_two_sequences()
    plan = _plan(_make_planner(host, buckets, sharded=True), batch)
    _assert_equal(
        plan,
        tokens=[14, 0, 13, 21],
        positions=[4, 0, 3, 1],
        seq_ids=[0, 0, 0, 1],
        num_rows=[1, 2],
        cu_q_lens=[0, 2, 3, 3],
        chunk_rows=[2, 0, 3, 0],
        last_rows=[0, 3, 0],
        prefix_lens=[3, 1, 0],
        bases=[0, 1, 0],
        page_table=[[[0, 2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]]],
        round_starts=[0, 4],
        send_pages=[[[3, 0]], [[1, 2]]],
        stage_rows=[[0, 0], [0, 1]],
        stage_cu_lens=[[0, 1, 1, 1], [0, 1, 2, 2]],
        write_rows=[[4, OUT], [3, 5]],
    )


def test_the_block_is_the_exact_maximum_over_owners():
    host = _make_host()
    long = _make_sequence(host, prefix_len=5 * 4, num_new=1, base=0)
    short = _make_fork(host, long, num_pages=3, prefix_len=3 * 4, num_new=2)
    other = _make_sequence(host, prefix_len=2 * 4, num_new=1, base=2)
    batch = [(short, 2), (long, 1), (other, 1)]
    shape = _shape(_make_planner(host), batch)
    assert shape is not None
    assert shape.block == 2
    plan = _build(_make_planner(host), batch, shape)
    sent = [np.count_nonzero(plan.send_pages[shard]) for shard in range(4)]
    assert sent == [2, 1, 2, 2]
    assert plan.page_table[0, 0, :3].tolist() == plan.page_table[0, 1, :3].tolist()


def test_send_lists_are_ordered_by_physical_page_not_by_position():
    host = _make_host()
    sequence = host.open(list(range(18)))
    pages = [4 * 9, 4 * 2 + 1, 4 * 2 + 2, 4 * 2 + 3, 4 * 3]
    host.table.extend_chain(sequence.request, np.array(pages))
    sequence.pages = pages
    host.compute(sequence, 17)
    plan = _plan(_make_planner(host), [(sequence, 1)])
    assert plan.send_pages[:, 0].tolist() == [[3, 9], [2, 0], [2, 0], [2, 0]]
    assert plan.page_table[0, 0, :5].tolist() == [1, 2, 4, 6, 0]


def test_pages_shared_by_several_requests_are_gathered_once():
    host = _make_host(num_shards=2, page_size=2)
    source = _make_sequence(host, prefix_len=12, num_new=1, base=1)
    forks = [
        _make_fork(host, source, num_pages=6, prefix_len=12, num_new=1)
        for _ in range(4)
    ]
    batch = [(sequence, 1) for sequence in (source, *forks)]
    shape = _shape(_make_planner(host), batch)
    assert shape is not None
    assert shape.block == 3
    plan = _build(_make_planner(host), batch, shape)
    assert np.count_nonzero(plan.send_pages) == 6
    for sequence in range(5):
        assert plan.page_table[0, sequence].tolist() == plan.page_table[0, 0].tolist()


@pytest.mark.parametrize("base", range(4))
@pytest.mark.parametrize("workspace", range(16, 81))
def test_a04_rounds_are_whole_rotations_for_every_workspace_and_base(workspace, base):
    host = _make_host()
    sequence = _make_sequence(host, prefix_len=70, num_new=3, base=base)
    buckets = _make_buckets(blocks=(workspace // 16,), rounds=tuple(range(1, 6)))
    plan = _plan(_make_planner(host, buckets), [(sequence, 3)])
    ranges = gather_ranges(70, workspace, num_shards=4, page_size=4)
    assert plan.round_starts[:-1].tolist() == [start for start, _ in ranges]
    assert plan.round_starts[-1] >= 70
    home = {page: position for position, page in enumerate(sequence.pages)}
    rows = []
    for number, (start, stop) in enumerate(ranges):
        scratch = [
            (shard, page)
            for shard in range(4)
            for page in plan.send_pages[shard, number].tolist()
        ]
        assert len(scratch) * 4 <= workspace
        for index in range(stop - start):
            shard, page = scratch[plan.page_table[number, 0, index // 4]]
            rows.append(home[4 * page + shard] * 4 + index % 4)
    assert rows == list(range(70))


@pytest.mark.parametrize("mode", ["striped", "assembled", "auto"])
@pytest.mark.parametrize(
    ("changes", "batch_size"),
    [
        ({"tokens": (1, 5)}, 2),
        ({"sequences": (1,)}, 2),
        ({"table_widths": (1,)}, 1),
    ],
)
def test_a_batch_over_the_largest_bucket_is_deferred(mode, changes, batch_size):
    host = _make_host(num_shards=2, page_size=2)
    sequences = [_make_sequence(host, prefix_len=5, num_new=3) for _ in range(2)]
    batch = [(sequence, 3) for sequence in sequences[:batch_size]]
    fits = _make_planner(host, _make_buckets(), mode)
    assert _shape(fits, batch) is not None
    planner = _make_planner(host, _make_buckets(**changes), mode)
    assert _shape(planner, batch) is None


def test_prefixes_over_the_scratch_are_deferred_if_assembled_and_striped_if_auto():
    host = _make_host(num_shards=2, page_size=2)
    sequences = [_make_sequence(host, prefix_len=12, num_new=2) for _ in range(3)]
    batch = [(sequence, 2) for sequence in sequences]
    rounds = tuple(range(1, 9))
    for block, batch_size, num_rounds in ((9, 3, 1), (8, 3, 2), (3, 3, 3), (1, 1, 3)):
        buckets = _make_buckets(blocks=(block,), rounds=rounds)
        shape = _shape(_make_planner(host, buckets), batch[:batch_size])
        assert shape is not None
        assert (shape.block, shape.num_rounds) == (block, num_rounds)
    too_few_rounds = _make_buckets(blocks=(3,), rounds=(1, 2))
    no_rotation_of_each = _make_buckets(blocks=(2,), rounds=rounds)
    for buckets in (too_few_rounds, no_rotation_of_each):
        assert _shape(_make_planner(host, buckets), batch) is None
        shape = _shape(_make_planner(host, buckets, "auto"), batch)
        assert shape is not None
        assert shape.num_rounds == 0


def test_sharded_tokens_that_crowd_one_owner_take_a_larger_bucket_or_are_deferred():
    host = _make_host(num_shards=2, page_size=4)
    crowded = [_make_sequence(host, prefix_len=0, num_new=4) for _ in range(2)]
    batch = [(sequence, 4) for sequence in crowded]
    shape = _shape(_make_planner(host, sharded=True), batch)
    assert shape is not None
    assert shape.num_tokens == 16
    buckets = _make_buckets(tokens=(8, 14))
    assert _shape(_make_planner(host, buckets, sharded=True), batch) is None
    spread = [crowded[0], _make_sequence(host, prefix_len=0, num_new=4, base=1)]
    shape = _shape(_make_planner(host, buckets, sharded=True), [(s, 4) for s in spread])
    assert shape is not None
    assert shape.num_tokens == 8


def test_a_shape_asked_before_the_pages_are_drawn_holds_for_every_base():
    host = _make_host(num_shards=3, page_size=2)
    planner = _make_planner(host, mode="striped", sharded=True)
    for bases in itertools.product(range(3), repeat=3):
        batch = [(host.open(list(range(length))), length) for length in (7, 1, 4)]
        shape = _shape(planner, batch)
        assert shape is not None
        # the fullest owner may have 3, 1 and 2 tokens of them
        assert shape.num_tokens == 3 * (3 + 1 + 2)
        for (sequence, length), base in zip(batch, bases, strict=True):
            host.grow(sequence, length, base)
        _check_plan(_build(planner, batch, shape), shape, host, batch)
        for sequence, _ in batch:
            host.allocator.free(sequence.request.pages())
            host.table.close(sequence.request)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("num_rounds", "block"), [(0, 0), (1, 0), (1, 2), (3, 2)])
def test_an_empty_plan_is_all_padding(sharded, num_rounds, block):
    host = _make_host(num_shards=2, page_size=2)
    _make_sequence(host, prefix_len=9, num_new=2)
    planner = _make_planner(host, sharded=sharded)
    shape = StepShape(6, 2, 3, num_rounds, block, planner.num_token_blocks)
    plan = planner.build((), np.zeros(0, np.int32), shape)
    written = plan.write_rows
    assert (written >= PAGES_PER_SHARD * 2).all()
    for name, field in plan._asdict().items():
        assert field.dtype == np.int32
        if name not in ("write_rows", "round_starts"):
            assert not field.any(), name
    assert plan.tokens.shape == plan.positions.shape == plan.seq_ids.shape == (6,)
    assert plan.chunk_rows.shape == (6,)
    assert plan.cu_q_lens.shape == (3,)
    assert plan.num_rows.shape == ((2,) if sharded else (1,))
    assert plan.stage_cu_lens.shape == (2, 3)
    assert plan.send_pages.shape == (2, num_rounds, block)
    assert plan.page_table.shape == ((num_rounds, 2, 6) if num_rounds else (2, 2, 3))
    assert plan.round_starts.shape == (num_rounds + 1,)


def test_auto_reads_decode_steps_striped_and_extends_by_the_cost_model():
    host = _make_host(num_shards=2, page_size=2)
    sequence = _make_sequence(host, prefix_len=16, num_new=8)
    planner = _make_planner(host, mode="auto", queries_per_kv_head=4.0)
    rounds = {}
    for count in (1, 3, 4, 8):
        shape = _shape(planner, [(sequence, count)])
        assert shape is not None
        rounds[count] = shape.num_rounds
    assert rounds == {1: 0, 3: 0, 4: 1, 8: 1}


def test_the_cost_models_modes_meet_at_equal_traffic():
    for gathered in range(50):
        for num_new_tokens in range(1, 12):
            assert reads_striped(
                num_new_tokens=num_new_tokens,
                gathered_tokens=gathered,
                queries_per_kv_head=3,
            ) == (gathered > 3 * num_new_tokens)


@pytest.mark.parametrize("mode", ["striped", "assembled", "auto"])
def test_asking_for_a_shape_and_building_a_plan_change_nothing(mode):
    host = _make_host(num_shards=3, page_size=2)
    batch = [
        (_make_sequence(host, prefix_len=7, num_new=3, base=1), 3),
        (_make_sequence(host, prefix_len=0, num_new=5, base=2), 4),
    ]
    names = ("num_tokens", "num_computed", "num_pages", "base", "next_token", "stripes")
    before = {name: getattr(host.table, name).copy() for name in names}
    _plan(_make_planner(host, mode=mode, sharded=True), batch)
    for name in names:
        np.testing.assert_array_equal(getattr(host.table, name), before[name])
    assert host.allocator.free_per_owner().sum() == 3 * (PAGES_PER_SHARD - 1) - 8
