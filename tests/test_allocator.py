"""The page allocator: worked numbers, refusals, and a model of Python lists."""

import copy
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxkv.errors import PageAccountingError
from jaxkv.host.allocator import PageAllocator


def _make_allocator(num_shards: int = 4, usable: int = 32) -> PageAllocator:
    return PageAllocator(num_shards, usable + 1)


def _allocate(
    allocator: PageAllocator, num_pages: int, first_owner: int | None = None
) -> np.ndarray:
    pages = allocator.allocate(num_pages, first_owner)
    assert pages is not None
    return pages


def _owners(pages: np.ndarray, num_shards: int = 4) -> list[int]:
    return [page % num_shards for page in pages.tolist()]


def _free(allocator: PageAllocator) -> list[int]:
    return allocator.free_per_owner().tolist()


def _state(allocator: PageAllocator) -> tuple[list[int], list[list[int]]]:
    """Holds of every usable page, and each class's pages in the order of draws."""
    first, last = allocator.num_shards, allocator.num_shards * allocator.pages_per_shard
    holds = allocator.holds(np.arange(first, last)).tolist()
    drained = copy.deepcopy(allocator)
    classes = [
        [int(_allocate(drained, 1, shard)[0]) for _ in range(count)]
        for shard, count in enumerate(_free(drained))
    ]
    return holds, classes


def test_a_122_token_chain_takes_8_pages_around_the_group():
    allocator = _make_allocator()
    pages = _allocate(allocator, -(-122 // 16), 0)
    assert pages.dtype == np.int32
    assert _owners(pages) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert _free(allocator) == [30, 30, 30, 30]
    allocator.free(pages[-1:])
    assert _free(allocator) == [30, 30, 30, 31]
    more = _allocate(allocator, -(-244 // 16) - 7, 3)
    assert _owners(more) == [3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert more[0] == pages[-1]
    assert _free(allocator) == [28, 28, 28, 28]
    allocator.free(np.concatenate([pages[:-1], more]))
    assert _free(allocator) == [32, 32, 32, 32]


def test_available_pages_is_the_floor_of_the_shortest_class():
    allocator = _make_allocator(usable=4)
    assert allocator.usable_pages == 16
    assert allocator.available_pages() == 16
    chains = [_allocate(allocator, 1, 3) for _ in range(4)]
    assert _free(allocator) == [4, 4, 4, 0]
    assert allocator.available_pages() == 0
    before = _state(allocator)
    assert allocator.allocate(4, 0) is None
    assert allocator.allocate(1, 3) is None
    assert _state(allocator) == before
    assert _owners(_allocate(copy.deepcopy(allocator), 3, 0)) == [0, 1, 2]
    allocator.free(chains[1])
    assert allocator.available_pages() == 4
    assert _owners(_allocate(allocator, 4, 0)) == [0, 1, 2, 3]


def test_roots_go_to_the_fullest_class_and_a_batch_draws_in_order():
    allocator = _make_allocator()
    roots = [_allocate(allocator, 1) for _ in range(9)]
    assert [_owners(root) for root in roots] == [
        [owner] for owner in (0, 1, 2, 3, 0, 1, 2, 3, 0)
    ]
    assert _free(allocator) == [29, 30, 30, 30]
    assert allocator.best_root() == 1
    chain = _allocate(allocator, 2)
    assert _owners(chain) == [1, 2]
    drawn = allocator.allocate_batch([(3, (1 + 2) % 4), (3, None), (1, None)])
    assert drawn is not None
    assert [_owners(pages) for pages in drawn] == [[3, 0, 1], [2, 3, 0], [1]]
    assert _free(allocator) == [27, 27, 28, 28]


def test_a_fresh_allocator_draws_ascending_and_a_freed_page_is_first_reused():
    allocator = _make_allocator(num_shards=3, usable=3)
    pages = _allocate(allocator, 7, 2)
    assert pages.tolist() == [5, 3, 4, 8, 6, 7, 11]
    allocator.free(pages[[1, 4]])
    assert _allocate(allocator, 1, 0).tolist() == [6]
    assert _allocate(allocator, 1, 0).tolist() == [3]


def test_one_shard_and_one_usable_page():
    allocator = _make_allocator(num_shards=1, usable=1)
    assert allocator.usable_pages == 1
    assert _allocate(allocator, 1).tolist() == [1]
    assert allocator.allocate(1) is None
    assert allocator.available_pages() == 0
    allocator.free(np.array([1]))
    assert allocator.available_pages() == 1


def test_a_draw_of_no_pages_is_empty():
    allocator = _make_allocator(num_shards=2, usable=1)
    _allocate(allocator, 2, 0)
    before = _state(allocator)
    assert _allocate(allocator, 0).shape == (0,)
    assert _allocate(allocator, 0, 1).dtype == np.int32
    assert allocator.allocate_batch([]) == []
    allocator.free(np.zeros(0, np.int32))
    allocator.share(np.zeros(0, np.int32))
    assert _state(allocator) == before


def test_a_batch_that_is_short_at_its_end_changes_nothing():
    allocator = _make_allocator(num_shards=2, usable=2)
    before = _state(allocator)
    assert allocator.allocate_batch([(2, 1), (1, 0), (1, 1), (1, 0)]) is None
    assert allocator.allocate_batch([(1, None), (10**6, None)]) is None
    assert _state(allocator) == before
    drawn = allocator.allocate_batch([(2, 1), (1, 0), (1, 1)])
    assert drawn is not None
    assert _free(allocator) == [0, 0]


def test_a_shared_page_is_free_after_its_last_holder():
    allocator = _make_allocator(num_shards=2, usable=2)
    pages = _allocate(allocator, 3, 0)
    assert allocator.holds(pages).tolist() == [1, 1, 1]
    allocator.share(pages[:2])
    allocator.share(pages[:1])
    assert allocator.holds(pages).tolist() == [3, 2, 1]
    allocator.free(pages)
    assert allocator.holds(pages).tolist() == [2, 1, 0]
    assert _free(allocator) == [1, 1]
    allocator.free(pages[:2])
    assert _free(allocator) == [1, 2]
    allocator.free(pages[:1])
    assert _free(allocator) == [2, 2]
    assert allocator.holds(pages).tolist() == [0, 0, 0]


def test_what_the_allocator_returns_is_the_callers_copy():
    allocator = _make_allocator(num_shards=2, usable=2)
    pages = _allocate(allocator, 2, 0)
    before = _state(allocator)
    allocator.free_per_owner()[:] = 7
    allocator.holds(pages)[:] = 7
    pages[:] = 7
    assert _state(allocator) == before


@pytest.mark.parametrize("verb", ["free", "share"])
@pytest.mark.parametrize(
    ("pages", "error", "message"),
    [
        ([4, 8, 4], ValueError, r"page 4 is given twice to {verb}"),
        ([4, 0], ValueError, r"page 0 is not a usable page of 4\.\.19 .*reserved"),
        ([4, 3], ValueError, r"page 3 is not a usable page of 4\.\.19 .*reserved"),
        ([4, 20], ValueError, r"page 20 is not a usable page of 4\.\.19"),
        ([4, -1], ValueError, r"page -1 is not a usable page of 4\.\.19"),
        ([4, 2**40], ValueError, r"page 1099511627776 is not a usable page"),
        ([4, 2**32 + 8], ValueError, r"page 4294967304 is not a usable page"),
        ([4.0], ValueError, r"page ids must be integers, got float64"),
        ([True], ValueError, r"page ids must be integers, got bool"),
        ([4, 5], PageAccountingError, r"cannot {verb} page 5: it is not allocated"),
        ([12, 4], PageAccountingError, r"cannot {verb} page 12: it is not allocated"),
    ],
)
def test_inconsistent_pages_are_refused_and_change_nothing(verb, pages, error, message):
    allocator = _make_allocator(usable=4)
    assert _allocate(allocator, 1, 0).tolist() == [4]
    assert _allocate(allocator, 1, 0).tolist() == [8]
    before = _state(allocator)
    with pytest.raises(error, match=message.format(verb=verb)):
        getattr(allocator, verb)(np.array(pages))
    assert _state(allocator) == before


def test_freeing_twice_is_refused_and_changes_nothing():
    allocator = _make_allocator(usable=4)
    pages = _allocate(allocator, 6, 1)
    allocator.free(pages[2:])
    before = _state(allocator)
    for again in (pages[2:], pages[1:3], pages[-1:]):
        with pytest.raises(PageAccountingError, match="is not allocated"):
            allocator.free(again)
    assert _state(allocator) == before
    assert (
        len(set(_allocate(allocator, 14, 3).tolist()) | set(pages[:2].tolist())) == 16
    )


def test_a02_two_releases_that_meet_inside_a_page_are_refused():
    allocator = _make_allocator(usable=4)
    chain = _allocate(allocator, 10, 0)
    first, second = chain[16 // 4 : -(-22 // 4)], chain[22 // 4 : -(-40 // 4)]
    before = _state(allocator)
    with pytest.raises(ValueError, match=f"page {chain[5]} is given twice"):
        allocator.free(np.concatenate([first, second]))
    assert _state(allocator) == before
    free = allocator.free_per_owner()
    allocator.free(np.union1d(first, second))
    assert (allocator.free_per_owner() - free).tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        ([(1, 0), (-1, 0)], "num_pages=-1 must be at least 0"),
        ([(1, 0), (1, 4)], r"first_owner=4 is not a shard of 0\.\.3"),
        ([(1, None), (1, -1)], r"first_owner=-1 is not a shard of 0\.\.3"),
        ([(99, 0), (1, 4)], r"first_owner=4 is not a shard of 0\.\.3"),
    ],
)
def test_a_draw_that_cannot_be_is_refused_and_changes_nothing(draws, message):
    allocator = _make_allocator(usable=4)
    before = _state(allocator)
    with pytest.raises(ValueError, match=message):
        allocator.allocate_batch(draws)
    assert _state(allocator) == before


@pytest.mark.parametrize("pages", [[0], [3], [20], [-1]])
def test_holds_of_a_page_that_cannot_be_held_is_refused(pages):
    with pytest.raises(ValueError, match=rf"page {pages[0]} is not a usable page"):
        _make_allocator(usable=4).holds(np.array(pages))


@pytest.mark.parametrize(
    ("num_shards", "pages_per_shard", "message"),
    [
        (0, 4, "num_shards=0 must be at least 1"),
        (-1, 4, "num_shards=-1 must be at least 1"),
        (2, 1, "pages_per_shard=1 must be at least 2: .* reserved"),
        (2, 0, "pages_per_shard=0 must be at least 2"),
    ],
)
def test_an_allocator_without_pages_is_refused(num_shards, pages_per_shard, message):
    with pytest.raises(ValueError, match=message):
        PageAllocator(num_shards, pages_per_shard)


DRAWS = st.tuples(st.integers(0, 7), st.one_of(st.none(), st.integers(0, 3)))


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator beside stacks of free pages and a multiset of holders."""

    def __init__(self):
        super().__init__()
        self.num_shards = 1
        self.free: list[list[int]] = []
        self.holders: Counter[int] = Counter()

    @initialize(num_shards=st.integers(1, 4), usable=st.integers(1, 4))
    def start(self, num_shards, usable):
        self.num_shards = num_shards
        self.last = num_shards * (usable + 1)
        self.allocator = PageAllocator(num_shards, usable + 1)
        self.free = [
            [
                page
                for page in range(self.last - 1, num_shards - 1, -1)
                if page % num_shards == shard
            ]
            for shard in range(num_shards)
        ]
        self.holders = Counter()

    def _draw(self, free: list[list[int]], num_pages: int, first_owner: int | None):
        """Pops pages one by one around the group; None at an empty class."""
        if first_owner is None:
            sizes = [len(pages) for pages in free]
            first_owner = sizes.index(max(sizes))
        drawn = []
        for step in range(num_pages):
            pages = free[(first_owner + step) % self.num_shards]
            if not pages:
                return None
            drawn.append(pages.pop())
        return drawn

    @rule(draws=st.lists(DRAWS, max_size=4))
    def allocate_batch(self, draws):
        draws = [
            (num_pages, None if owner is None else owner % self.num_shards)
            for num_pages, owner in draws
        ]
        free = copy.deepcopy(self.free)
        expected = []
        for draw in draws:
            pages = self._draw(free, *draw)
            if pages is None:
                assert self.allocator.allocate_batch(draws) is None
                return
            expected.append(pages)
        drawn = self.allocator.allocate_batch(draws)
        assert drawn is not None
        assert [pages.tolist() for pages in drawn] == expected
        self.free = free
        self.holders.update(page for pages in expected for page in pages)

    @rule(draw=DRAWS)
    def allocate(self, draw):
        num_pages, owner = draw
        owner = None if owner is None else owner % self.num_shards
        free = copy.deepcopy(self.free)
        expected = self._draw(free, num_pages, owner)
        drawn = self.allocator.allocate(num_pages, owner)
        if expected is None:
            assert drawn is None
            return
        assert drawn is not None
        assert drawn.tolist() == expected
        self.free = free
        self.holders.update(expected)

    def _held(self) -> list[int]:
        return sorted(page for page, count in self.holders.items() if count)

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.lists(st.sampled_from(self._held()), unique=True))
        self.allocator.share(np.array(pages, np.int32))
        self.holders.update(pages)

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def free_pages(self, data):
        pages = data.draw(st.lists(st.sampled_from(self._held()), unique=True))
        self.allocator.free(np.array(pages, np.int32))
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free[page % self.num_shards].append(page)

    @rule(
        verb=st.sampled_from(["free", "share"]),
        pages=st.lists(st.integers(-2, 22), min_size=1, max_size=5),
    )
    def refuse(self, verb, pages):
        usable = all(self.num_shards <= page < self.last for page in pages)
        distinct = len(set(pages)) == len(pages)
        if usable and distinct and all(self.holders[page] for page in pages):
            return
        error = PageAccountingError if usable and distinct else ValueError
        before = _state(self.allocator)
        with pytest.raises(error):
            getattr(self.allocator, verb)(np.array(pages))
        assert _state(self.allocator) == before

    @invariant()
    def agrees_with_the_model(self):
        if not self.free:
            return
        sizes = [len(pages) for pages in self.free]
        assert _free(self.allocator) == sizes
        assert self.allocator.available_pages() == self.num_shards * min(sizes)
        assert self.allocator.best_root() == sizes.index(max(sizes))
        holds, classes = _state(self.allocator)
        assert holds == [self.holders[p] for p in range(self.num_shards, self.last)]
        assert classes == [pages[::-1] for pages in self.free]

    @invariant()
    def every_page_is_free_or_held(self):
        if not self.free:
            return
        free = [page for pages in self.free for page in pages]
        assert sorted(free + self._held()) == list(range(self.num_shards, self.last))
        assert self.allocator.usable_pages == self.last - self.num_shards


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)
TestAllocatorMachine = AllocatorMachine.TestCase
