"""The eviction queue: what a leaf gives, what it costs, and stale entries."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.host.eviction import (
    NOT_QUEUED,
    POLICIES,
    EvictionQueue,
    fifo,
    lfu,
    lru,
    reach,
    take_costs,
)


@dataclasses.dataclass(eq=False)
class _Leaf:
    pages: np.ndarray
    last_used: int = 0
    num_uses: int = 1
    created: int = 0
    ticket: int = NOT_QUEUED


def _make_leaf(*owners: int, num_shards: int = 4, **fields) -> _Leaf:
    pages = [num_shards * (index + 1) + owner for index, owner in enumerate(owners)]
    return _Leaf(np.array(pages, np.int32), **fields)


_SHORT = st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any)


@given(short=_SHORT)
def test_a_leafs_cost_is_the_distance_to_the_first_page_that_helps(short):
    num_shards = len(short)
    for last, cost in enumerate(take_costs(np.array(short))):
        owners = [(last - step) % num_shards for step in range(num_shards)]
        assert cost == 1 + next(i for i, owner in enumerate(owners) if short[owner])


@given(short=_SHORT, base=st.integers(0, 4), num_pages=st.integers(1, 14))
def test_a_leaf_gives_pages_while_they_help(short, base, num_pages):
    num_shards = len(short)
    owners = [(base + index) % num_shards for index in range(num_pages)]
    leaf = _make_leaf(*owners, num_shards=num_shards)
    left = list(short)
    helpful = []
    for owner in reversed(owners):
        helpful.append(left[owner] > 0)
        left[owner] -= 1
    if helpful[0]:
        expected = helpful.index(False) if False in helpful else num_pages
    else:
        expected = helpful.index(True) + 1 if True in helpful else num_pages
    assert reach(leaf.pages, np.array(short)) == expected


def test_where_all_owners_are_short_the_oldest_goes():
    queue = EvictionQueue(4, lru)
    leaves = [
        _make_leaf(owner, last_used=age) for owner, age in ((0, 7), (3, 5), (1, 6))
    ]
    for leaf in leaves:
        queue.push(leaf)
    order = [queue.pop(np.ones(4, int)) for _ in leaves]
    assert order == [leaves[1], leaves[2], leaves[0]]
    assert queue.pop(np.ones(4, int)) is None


def test_of_equals_the_first_released_goes():
    queue = EvictionQueue(4, lambda leaf: 0)
    leaves = [_make_leaf(owner) for owner in (2, 0, 3, 0)]
    for leaf in leaves:
        queue.push(leaf)
    assert [queue.pop(np.ones(4, int)) for _ in leaves] == leaves


def test_age_is_weighed_against_pages_in_vain():
    queue = EvictionQueue(4, lru)
    # to reach a page of owner 1 costs 1, 2 and 4 pages
    helps, near, far = (
        _make_leaf(0, 1, last_used=80),
        _make_leaf(0, 1, 2, last_used=71),
        _make_leaf(1, 2, 3, 0, last_used=1),
    )
    for leaf in (helps, near, far, _make_leaf(0, last_used=100)):
        queue.push(leaf)
    short = np.array([0, 1, 0, 0])
    # ages 100, 21 and 30
    assert [queue.pop(short) for _ in range(3)] == [far, helps, near]


def test_a_changed_leaf_is_queued_once_where_it_belongs_now():
    queue = EvictionQueue(2, lru)
    leaf = _make_leaf(0, 1, num_shards=2, last_used=1)
    other = _make_leaf(0, num_shards=2, last_used=2)
    queue.push(leaf)
    queue.push(other)
    leaf.pages = leaf.pages[:1]
    leaf.last_used = 3
    queue.push(leaf)
    assert len(queue) == 2
    assert [queue.pop(np.ones(2, int)) for _ in range(3)] == [other, leaf, None]
    queue.push(leaf)
    queue.discard(leaf)
    queue.discard(leaf)
    assert len(queue) == 0
    assert queue.pop(np.ones(2, int)) is None


def test_entries_do_not_pile_up_where_nothing_is_evicted():
    queue = EvictionQueue(1, lru)
    leaves = [_make_leaf(0, num_shards=1, last_used=age) for age in range(10)]
    for leaf in leaves * 200:
        queue.push(leaf)
    assert sum(len(heap) for heap in queue._heaps) <= 2 * len(leaves) + 65
    assert [queue.pop(np.ones(1, int)) for _ in leaves] == leaves


def test_policies_by_name():
    leaf = _make_leaf(0, last_used=5, num_uses=2, created=3)
    often = _make_leaf(0, last_used=1, num_uses=3, created=4)
    assert {"lru": lru, "lfu": lfu, "fifo": fifo} == POLICIES
    assert lru(leaf) > lru(often)
    assert lfu(leaf) < lfu(often)
    assert fifo(leaf) < fifo(often)
    often.num_uses = 2
    assert lfu(leaf) > lfu(often)
