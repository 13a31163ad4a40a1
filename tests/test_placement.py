"""Placement against token-by-token counts; cases A01 and A04."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import placement

GEOMETRIES = list(itertools.product(range(1, 6), range(1, 6)))


def _make_owners(num_tokens: int, base: int, num_shards: int, page_size: int):
    """Owner of every token, page by page around the group."""
    owners = []
    shard = base
    while len(owners) < num_tokens:
        owners += [shard] * page_size
        shard = 0 if shard == num_shards - 1 else shard + 1
    return owners[:num_tokens]


def _tokens_per_owner(length, base, num_shards, page_size):
    return [
        placement.tokens_per_owner(
            length, base, shard, num_shards=num_shards, page_size=page_size
        )
        for shard in range(num_shards)
    ]


@pytest.mark.parametrize(
    ("page_size", "base", "length", "expected"),
    [
        (1, 0, 8, [2, 2, 2, 2]),
        (1, 0, 9, [3, 2, 2, 2]),
        (4, 0, 0, [0, 0, 0, 0]),
        (4, 0, 15, [4, 4, 4, 3]),
        (4, 0, 16, [4, 4, 4, 4]),
        (4, 0, 17, [5, 4, 4, 4]),
        (4, 0, 30, [8, 8, 8, 6]),
        (4, 0, 32, [8, 8, 8, 8]),
        (4, 3, 17, [4, 4, 4, 5]),
        (4, 2, 30, [8, 6, 8, 8]),
    ],
)
def test_a01_tokens_per_owner(page_size, base, length, expected):
    assert _tokens_per_owner(length, base, 4, page_size) == expected


@pytest.mark.parametrize(("num_shards", "page_size"), GEOMETRIES)
def test_a01_counts_equal_a_count_by_owner_for_every_length(num_shards, page_size):
    for base in range(num_shards):
        owners = _make_owners(3 * num_shards * page_size, base, num_shards, page_size)
        counts = [0] * num_shards
        for length in range(len(owners) + 1):
            assert _tokens_per_owner(length, base, num_shards, page_size) == counts
            assert sum(counts) == length
            if length < len(owners):
                counts[owners[length]] += 1


@pytest.mark.parametrize(("num_shards", "page_size"), GEOMETRIES)
def test_pages_per_owner_equals_a_count_by_owner(num_shards, page_size):
    for base in range(num_shards):
        pages = _make_owners(3 * num_shards, base, num_shards, 1)
        for num_pages in range(len(pages) + 1):
            counts = [
                placement.pages_per_owner(num_pages, base, shard, num_shards)
                for shard in range(num_shards)
            ]
            assert counts == [
                pages[:num_pages].count(shard) for shard in range(num_shards)
            ]


@pytest.mark.parametrize(("num_shards", "page_size"), [(1, 3), (3, 2), (4, 4)])
def test_a_window_is_one_range_of_each_owners_tokens(num_shards, page_size):
    for base in range(num_shards):
        owners = _make_owners(
            2 * num_shards * page_size + 1, base, num_shards, page_size
        )
        for stop in range(len(owners) + 1):
            stops = _tokens_per_owner(stop, base, num_shards, page_size)
            for start in range(stop + 1):
                starts = _tokens_per_owner(start, base, num_shards, page_size)
                for shard in range(num_shards):
                    local = [p for p, owner in enumerate(owners) if owner == shard]
                    inside = [p for p in local if start <= p < stop]
                    assert local[starts[shard] : stops[shard]] == inside


@pytest.mark.parametrize(("num_shards", "page_size"), GEOMETRIES)
def test_chain_owner_is_cyclic_from_the_base(num_shards, page_size):
    for base in range(num_shards):
        owners = [placement.chain_owner(page, base, num_shards) for page in range(12)]
        assert owners == _make_owners(12, base, num_shards, 1)


@pytest.mark.parametrize(("num_shards", "page_size"), GEOMETRIES)
def test_locs_and_rows_round_trip(num_shards, page_size):
    pages_per_shard = 3
    num_rows = pages_per_shard * page_size
    seen = set()
    for page in range(num_shards * pages_per_shard):
        shard = placement.owner(page, num_shards)
        stored = placement.physical(page, num_shards)
        assert 0 <= shard < num_shards
        assert 0 <= stored < pages_per_shard
        assert placement.logical(shard, stored, num_shards) == page
        for offset in range(page_size):
            loc = placement.location(page, offset, page_size)
            assert divmod(loc, page_size) == (page, offset)
            row = placement.pool_row(loc, num_shards=num_shards, page_size=page_size)
            assert row == stored * page_size + offset
            seen.add((shard, row))
    assert seen == set(itertools.product(range(num_shards), range(num_rows)))
    locs = num_shards * pages_per_shard * page_size
    assert placement.location(page, offset, page_size) == locs - 1


def test_exact_values_of_a_four_shard_group():
    pages = list(range(4, 13))
    assert [placement.owner(page, 4) for page in pages] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [placement.physical(page, 4) for page in pages] == [1] * 4 + [2] * 4 + [3]
    assert placement.location(6, 3, 4) == 27
    assert placement.pool_row(27, num_shards=4, page_size=4) == 7


def test_the_reserved_pages_are_the_first_logical_page_of_each_owner():
    for num_shards in range(1, 6):
        reserved = [
            placement.logical(shard, placement.RESERVED_PAGE, num_shards)
            for shard in range(num_shards)
        ]
        assert reserved == list(range(num_shards))


GRID = np.array(
    list(itertools.product(range(0, 20, 3), range(3), range(3))), np.int32
).T
FUNCTIONS = {
    "owner": lambda a, b, c: placement.owner(a, 3),
    "physical": lambda a, b, c: placement.physical(a, 3),
    "logical": lambda a, b, c: placement.logical(b, a, 3),
    "chain_owner": lambda a, b, c: placement.chain_owner(a, b, 3),
    "pages_per_owner": lambda a, b, c: placement.pages_per_owner(a, b, c, 3),
    "tokens_per_owner": lambda a, b, c: placement.tokens_per_owner(
        a, b, c, num_shards=3, page_size=2
    ),
    "location": lambda a, b, c: placement.location(a, b, 3),
    "pool_row": lambda a, b, c: placement.pool_row(a, num_shards=3, page_size=2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_int_numpy_and_jax_give_the_same_from_one_definition(name):
    function = FUNCTIONS[name]
    ints = [function(*column) for column in GRID.T.tolist()]
    assert all(type(value) is int for value in ints)
    array = function(*GRID)
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.int32
    assert array.tolist() == ints
    on_device = function(*jnp.asarray(GRID))
    assert isinstance(on_device, jax.Array)
    assert on_device.dtype == jnp.int32
    assert np.asarray(on_device).tolist() == ints


def _regather(ranges, prefix_len, base, num_shards, page_size):
    """Prefix tokens as gathers of each range give them back.

    Every owner sends its tokens of the range in its own order; the assembly takes
    pages around the group from the base, whatever token the range starts at.
    """
    owners = _make_owners(prefix_len, base, num_shards, page_size)
    rows = []
    sent = [0] * num_shards
    for start, stop in ranges:
        parts = []
        for shard in range(num_shards):
            local = [p for p, owner in enumerate(owners) if owner == shard]
            count = owners[start:stop].count(shard)
            parts.append(local[sent[shard] : sent[shard] + count])
            sent[shard] += count
        for index in range(stop - start):
            page, offset = divmod(index, page_size)
            part = parts[(base + page) % num_shards]
            local_row = page // num_shards * page_size + offset
            rows.append(part[local_row] if local_row < len(part) else None)
    return rows


def test_a04_a_step_of_part_of_a_rotation_goes_wrong_at_row_40():
    rows = _regather([(0, 40), (40, 70)], 70, 0, 4, 4)
    assert rows[:40] == list(range(40))
    assert rows[40:42] == [48, 49]


def test_a04_ranges_are_whole_rotations():
    ranges = placement.gather_ranges(70, 40, num_shards=4, page_size=4)
    assert ranges == [(0, 32), (32, 64), (64, 70)]


@pytest.mark.parametrize("base", range(4))
@pytest.mark.parametrize("workspace", range(16, 81))
def test_a04_every_workspace_and_base_gives_the_rows_in_order(workspace, base):
    ranges = placement.gather_ranges(70, workspace, num_shards=4, page_size=4)
    assert all(0 < stop - start <= workspace for start, stop in ranges)
    assert _regather(ranges, 70, base, 4, 4) == list(range(70))


@pytest.mark.parametrize(("num_shards", "page_size"), GEOMETRIES)
def test_gather_ranges_cover_the_prefix_in_the_fewest_whole_rotations(
    num_shards, page_size
):
    rotation = num_shards * page_size
    for prefix_len in range(2 * rotation + 2):
        for workspace in range(rotation, 3 * rotation + 1):
            ranges = placement.gather_ranges(
                prefix_len, workspace, num_shards=num_shards, page_size=page_size
            )
            covered = [p for start, stop in ranges for p in range(start, stop)]
            assert covered == list(range(prefix_len))
            steps = {stop - start for start, stop in ranges[:-1]}
            largest = max(size for size in range(workspace + 1) if size % rotation == 0)
            assert steps <= {largest}


@pytest.mark.parametrize("workspace", [15, 1, 0, -16])
def test_a04_a_workspace_under_a_rotation_is_refused(workspace):
    with pytest.raises(ValueError, match=rf"workspace={workspace} .*rotation of 16"):
        placement.gather_ranges(70, workspace, num_shards=4, page_size=4)


def test_a_workspace_under_a_rotation_is_refused_for_an_empty_prefix_too():
    with pytest.raises(ValueError, match="rotation of 16"):
        placement.gather_ranges(0, 15, num_shards=4, page_size=4)
