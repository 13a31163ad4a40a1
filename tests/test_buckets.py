"""Static sizes: one rule, and every shape that a step can take is declared (A11)."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.host.allocator import PageAllocator
from jaxkv.host.buckets import Buckets, StepShape, geometric, round_up
from jaxkv.host.planner import Mode, Planner
from jaxkv.host.request import Request, RequestTable

PAGES_PER_SHARD = 120


class _Host:
    """A table whose requests have prefixes on real pages."""

    def __init__(self, num_shards: int, page_size: int):
        self.table = RequestTable(num_shards, page_size)
        self.allocator = PageAllocator(num_shards, PAGES_PER_SHARD)

    def open(
        self,
        prefix_len: int,
        num_new: int,
        *,
        base: int = 0,
        source: Request | None = None,
        num_shared: int = 0,
        num_spare: int = 0,
    ) -> Request:
        """A request whose first `num_shared` pages are those of another.

        `num_spare` further pages are those of a step that was planned and dropped.
        """
        table, num_shards = self.table, self.table.num_shards
        request = table.open(np.zeros(prefix_len + num_new, np.int32))
        if source is not None:
            shared = source.pages()[:num_shared]
            self.allocator.share(shared)
            table.extend_chain(request, shared)
        missing = -(-prefix_len // table.page_size) - request.num_pages + num_spare
        first = request.pages()[-1] + 1 if request.num_pages else base
        pages = self.allocator.allocate(missing, int(first) % num_shards)
        assert pages is not None
        table.extend_chain(request, pages)
        table.advance([request], np.array([prefix_len]))
        return request


def test_rounds_start_at_one():
    with pytest.raises(ValueError, match=r"rounds=\(2,\) must start at 1"):
        Buckets(
            tokens=(1,), sequences=(1,), table_widths=(1,), blocks=(1,), rounds=(2,)
        )


def _make_buckets(**changes) -> Buckets:
    return Buckets(
        **{
            "tokens": (1, 4, 16),
            "sequences": (1, 4),
            "table_widths": (1, 3),
            "blocks": (1, 2),
            "rounds": (1, 2),
        }
        | changes
    )


def _make_planner(
    host: _Host, buckets: Buckets, mode: Mode, *, sharded: bool = False
) -> Planner:
    return Planner(
        table=host.table,
        buckets=buckets,
        pages_per_shard=PAGES_PER_SHARD,
        num_token_blocks=host.table.num_shards if sharded else 1,
        mode=mode,
        queries_per_kv_head=2.0,
    )


def _shape(planner: Planner, batch: list[tuple[Request, int]]) -> StepShape | None:
    slots = np.array([request.slot for request, _ in batch], np.int32)
    counts = np.array([count for _, count in batch], np.int32)
    return planner.shape(slots, counts)


def _declared(planner: Planner) -> list[StepShape]:
    return list(
        planner.buckets.shapes(
            num_token_blocks=planner.num_token_blocks,
            striped=planner.mode != "assembled",
            assembled=planner.mode != "striped",
        )
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 1), (1, 1), (2, 4), (4, 4), (5, 16), (16, 16), (17, None), (10**12, None)],
)
def test_round_up_takes_the_next_size_and_none_over_the_largest(size, expected):
    assert round_up(size, (1, 4, 16)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 1), (1,)),
        ((1, 2), (1, 2)),
        ((1, 16), (1, 4, 16)),
        ((1, 17), (1, 4, 16, 17)),
        ((3, 20), (3, 12, 20)),
        ((1, 9, 2), (1, 2, 4, 8, 9)),
    ],
)
def test_geometric(arguments, expected):
    assert geometric(*arguments) == expected


def test_make_goes_up_to_the_bounds():
    buckets = Buckets.make(
        num_shards=4,
        page_size=2,
        max_tokens=50,
        max_sequences=6,
        max_seq_len=100,
        max_prefix_tokens=40,
    )
    assert buckets == Buckets(
        tokens=(1, 4, 6, 16, 50),
        sequences=(1, 4, 6),
        table_widths=(1, 4, 13),
        blocks=(1, 4, 5),
        rounds=(1, 2, 3),
    )


def test_make_gives_one_round_where_the_scratch_holds_the_longest_prefix():
    sizes = {"num_shards": 2, "page_size": 4, "max_tokens": 8, "max_sequences": 2}
    one = Buckets.make(**sizes, max_seq_len=33, max_prefix_tokens=40)
    assert (one.blocks, one.rounds) == ((1, 4, 5), (1,))
    two = Buckets.make(**sizes, max_seq_len=33, max_prefix_tokens=39)
    assert (two.blocks, two.rounds) == ((1, 4), (1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens=0 must be at least 1"),
        ({"max_sequences": 0}, r"max_sequences=0 must be at least 1"),
        ({"max_sequences": -3}, r"max_sequences=-3 must be at least 1"),
        ({"max_seq_len": 0}, r"max_seq_len=0 must be at least 1"),
        ({"max_tokens": 3}, r"max_tokens=3 must be at least max_sequences=4"),
        (
            {"max_prefix_tokens": 7},
            r"max_prefix_tokens=7 must be at least one rotation of 8 tokens "
            r"\(num_shards=4 x page_size=2\)",
        ),
        ({"max_prefix_tokens": 0}, r"max_prefix_tokens=0 must be at least one rot"),
    ],
)
def test_make_refuses_bounds_that_cannot_be(changes, message):
    bounds = {
        "num_shards": 4,
        "page_size": 2,
        "max_tokens": 8,
        "max_sequences": 4,
        "max_seq_len": 30,
        "max_prefix_tokens": 8,
    }
    Buckets.make(**bounds)
    with pytest.raises(ValueError, match=message):
        Buckets.make(**bounds | changes)


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1), (-1,)])
@pytest.mark.parametrize(
    "name", ["tokens", "sequences", "table_widths", "blocks", "rounds"]
)
def test_sizes_that_do_not_ascend_from_one_are_refused(name, sizes):
    message = f"{name}={sizes} must be ascending sizes of at least 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        _make_buckets(**{name: sizes})


def test_shapes_of_a_small_striped_cache():
    buckets = _make_buckets(tokens=(1, 4), sequences=(1, 2), table_widths=(1, 3))
    shapes = list(buckets.shapes(num_token_blocks=1, striped=True, assembled=False))
    assert shapes == [
        StepShape(1, 1, 1, 0, 0, 1),
        StepShape(1, 1, 3, 0, 0, 1),
        StepShape(4, 1, 1, 0, 0, 1),
        StepShape(4, 1, 3, 0, 0, 1),
        StepShape(4, 2, 1, 0, 0, 1),
        StepShape(4, 2, 3, 0, 0, 1),
    ]


def test_shapes_of_a_small_assembled_cache_with_sharded_tokens():
    buckets = _make_buckets(tokens=(1, 3), sequences=(1,), table_widths=(1, 3))
    shapes = list(buckets.shapes(num_token_blocks=2, striped=False, assembled=True))
    # one sequence of up to 3 pages a shard, and a scratch of 2
    assert [shape[2:5] for shape in shapes if shape.num_tokens == 2] == [
        (1, 1, 0),
        (1, 1, 1),
        (3, 1, 2),
        (3, 2, 2),
    ]
    assert {shape.num_tokens for shape in shapes} == {2, 4}
    assert {shape.num_token_blocks for shape in shapes} == {2}


@pytest.mark.parametrize("num_token_blocks", [1, 3])
def test_no_shape_is_declared_twice(num_token_blocks):
    buckets = _make_buckets(tokens=(1, 2, 3, 4, 16), blocks=(1, 2, 5))
    shapes = list(
        buckets.shapes(num_token_blocks=num_token_blocks, striped=True, assembled=True)
    )
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("mode", ["striped", "assembled", "auto"])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_a11_prefill_and_decode_shapes_are_declared(page_size, mode, sharded):
    buckets = Buckets.make(
        num_shards=2,
        page_size=page_size,
        max_tokens=60,
        max_sequences=3,
        max_seq_len=11,
        max_prefix_tokens=96,
    )
    for lengths in ((10, 7, 1), (10, 10, 10), (1,)):
        host = _Host(2, page_size)
        planner = _make_planner(host, buckets, mode, sharded=sharded)
        declared = _declared(planner)
        requests = [host.open(0, length) for length in lengths]
        prefill = list(zip(requests, lengths, strict=True))
        assert _shape(planner, prefill) in declared
        decoding = [(host.open(length, 1), 1) for length in lengths]
        assert _shape(planner, decoding) in declared
        mixed = [*decoding[1:], *prefill[:1]]
        assert _shape(planner, mixed) in declared


@pytest.mark.parametrize("mode", ["striped", "assembled"])
def test_a11_an_extent_over_a_bucket_takes_the_next_and_over_the_largest_none(mode):
    host = _Host(2, 2)
    planner = _make_planner(host, _make_buckets(), mode)
    prompt = host.open(0, 20)
    tokens = []
    for count in (1, 2, 4, 5, 16, 17):
        shape = _shape(planner, [(prompt, count)])
        tokens.append(shape and shape.num_tokens)
    assert tokens == [1, 4, 4, 16, 16, None]
    decoding = [(host.open(2, 1), 1) for _ in range(5)]
    sequences = []
    for count in (1, 2, 4, 5):
        shape = _shape(planner, decoding[:count])
        sequences.append(shape and shape.num_sequences)
    assert sequences[:2] == [1, 4]
    assert sequences[3] is None
    widths = []
    for prefix_len in (0, 4, 5, 12, 13):
        shape = _shape(planner, [(host.open(prefix_len, 1), 1)])
        widths.append(shape and shape.table_width)
    assert widths == [1, 1, 3, 3, None]


@st.composite
def _sizes(draw, largest: int):
    sizes = draw(st.sets(st.integers(1, largest), max_size=3))
    return tuple(sorted({*sizes, draw(st.integers(1, largest))}))


@st.composite
def _buckets(draw, num_shards: int, page_size: int):
    if draw(st.booleans()):
        rotation = num_shards * page_size
        max_sequences = draw(st.integers(1, 6))
        return Buckets.make(
            num_shards=num_shards,
            page_size=page_size,
            max_tokens=draw(st.integers(max_sequences, 80)),
            max_sequences=max_sequences,
            max_seq_len=draw(st.integers(1, 6 * rotation)),
            max_prefix_tokens=draw(st.integers(rotation, 8 * rotation)),
        )
    return Buckets(
        tokens=draw(_sizes(80)),
        sequences=draw(_sizes(6)),
        table_widths=draw(_sizes(6)),
        blocks=draw(_sizes(12)),
        rounds=tuple(sorted({1, *draw(_sizes(6))})),
    )


@st.composite
def _batches(draw, host: _Host) -> list[tuple[Request, int]]:
    num_shards, page_size = host.table.num_shards, host.table.page_size
    rotation = num_shards * page_size
    batch = []
    decodes_only = draw(st.integers(0, 3)) == 0
    for _ in range(draw(st.integers(1, 6))):
        source = draw(st.sampled_from([None, *(request for request, _ in batch)]))
        full_pages = 0 if source is None else source.num_computed // page_size
        num_shared = draw(st.integers(0, full_pages))
        prefix_len = num_shared * page_size
        prefix_len += draw(st.one_of(st.just(0), st.integers(0, 5 * rotation)))
        count = 1 if decodes_only else draw(st.integers(1, 20))
        request = host.open(
            prefix_len,
            count,
            base=draw(st.integers(0, num_shards - 1)),
            source=source,
            num_shared=num_shared,
            num_spare=draw(st.sampled_from([0, 0, 1, 3])),
        )
        batch.append((request, count))
    return batch


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("mode", ["striped", "assembled", "auto"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a11_every_shape_of_a_random_batch_is_declared(mode, sharded, data):
    host = _Host(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)))
    buckets = data.draw(_buckets(host.table.num_shards, host.table.page_size))
    planner = _make_planner(host, buckets, mode, sharded=sharded)
    batch = data.draw(_batches(host))
    declared = {*_declared(planner), None}
    for size in range(1, len(batch) + 1):
        assert _shape(planner, batch[:size]) in declared
