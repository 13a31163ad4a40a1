"""The prefix cache: worked numbers, refusals, and the public bug reports."""

import numpy as np
import pytest
from prefix_loop import Loop, LoopRequest, tree_nodes

from jaxkv.errors import PageAccountingError
from jaxkv.host.eviction import fifo, lfu, lru
from jaxkv.host.namespace import Namespace
from jaxkv.host.prefix_cache import PrefixCache


def _range(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int32)


def _pages(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def _make_cache(num_shards: int = 1, page_size: int = 4, **options) -> PrefixCache:
    return PrefixCache(num_shards, 64, page_size, **options)


def _serve(loop: Loop, tokens: list[int], **options) -> LoopRequest:
    """A request with all its tokens computed, still open."""
    request = loop.open(tokens)
    missing = len(tokens) - request.num_computed
    assert loop.compute(request, missing, **options)
    return request


def _evict(cache: PrefixCache, *short: int) -> list[int] | None:
    evicted = cache.evict(np.array(short), np.zeros(len(short), int))
    return None if evicted is None else evicted.tolist()


def _snapshot(cache: PrefixCache):
    stats = [np.asarray(field).tolist() for field in cache.stats()]
    shape = [
        (node.tokens.tolist(), node.pages.tolist(), node.leases)
        for node in tree_nodes(cache)
    ]
    return stats, shape, cache.pages().tolist()


# matching


def test_a_match_is_whole_pages_and_never_the_whole_prompt():
    cache = _make_cache()
    cache.insert(_range(0, 12), _pages(5, 6, 7))
    hits = [cache.match(_range(0, size)).num_tokens for size in range(16)]
    assert hits == [0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12]
    match = cache.match(_range(0, 13))
    assert match.pages.tolist() == [5, 6, 7]
    assert match.pages.dtype == np.int32
    assert (match.num_pages, match.num_asked) == (3, 13)


def test_a_match_ends_where_tokens_differ_in_an_edge_or_between_edges():
    cache = _make_cache(page_size=2)
    first = np.array([1, 1, 2, 2, 3, 3])
    second = np.array([1, 1, 2, 2, 4, 4])
    cache.insert(first, _pages(1, 2, 3))
    assert cache.match(np.array([1, 1, 2, 9, 3, 3, 0])).pages.tolist() == [1]
    cache.insert(second, _pages(1, 2, 4))
    assert cache.match(np.array([1, 1, 2, 2, 4, 4, 0])).pages.tolist() == [1, 2, 4]
    assert cache.match(np.array([1, 1, 2, 2, 5, 4, 0])).pages.tolist() == [1, 2]
    assert cache.match(np.array([1, 2, 2, 2])).pages.tolist() == []


def test_a_match_changes_nothing():
    cache = _make_cache()
    for start, page in ((0, 1), (100, 2)):
        cache.insert(_range(start, start + 4), _pages(page))
    before = _snapshot(cache)
    for _ in range(3):
        cache.match(_range(0, 9))
    assert _snapshot(cache) == before
    assert _evict(cache, 1) == [1]


@pytest.mark.parametrize("kind", [list, np.int64, np.uint8])
def test_tokens_of_any_integer_kind_match(kind):
    cache = _make_cache()
    tokens = list(range(9)) if kind is list else np.arange(9, dtype=kind)
    cache.insert(tokens[:8], _pages(1, 2))
    assert cache.match(tokens).num_tokens == 8


def test_a_match_reaches_a_caller_as_a_copy():
    cache = _make_cache()
    tokens, pages = _range(0, 8), _pages(1, 2)
    cache.insert(tokens, pages)
    tokens[:] = 7
    pages[:] = 7
    cache.match(_range(0, 9)).pages[:] = 7
    assert cache.match(_range(0, 9)).pages.tolist() == [1, 2]


# leases


def test_leases_count_from_the_matched_node_to_the_root():
    cache = _make_cache()
    cache.insert(_range(0, 16), _pages(1, 2, 3, 4))
    lease = cache.lease(cache.match(_range(0, 9)))
    assert lease.num_pages == 2
    assert cache.stats().protected_pages.tolist() == [2]
    assert cache.evictable_per_owner().tolist() == [2]
    assert _evict(cache, 3) is None
    assert _evict(cache, 2) == [4, 3]
    assert _evict(cache, 1) is None
    cache.release(lease)
    assert cache.stats().protected_pages.tolist() == [0]
    assert _evict(cache, 2) == [2, 1]


def test_a_split_keeps_what_is_leased_below_it():
    cache = _make_cache()
    cache.insert(_range(0, 16), _pages(1, 2, 3, 4))
    deep = cache.lease(cache.match(_range(0, 17)))
    shallow = cache.lease(cache.match(_range(0, 5)))
    assert cache.stats().protected_pages.tolist() == [4]
    cache.release(shallow)
    assert cache.stats().protected_pages.tolist() == [4]
    cache.insert(np.append(_range(0, 8), _range(50, 54)), _pages(1, 2, 9))
    assert cache.stats().protected_pages.tolist() == [4]
    assert cache.evictable_per_owner().tolist() == [1]
    cache.release(deep)
    assert cache.evictable_per_owner().tolist() == [5]


def test_an_empty_match_can_be_leased_and_released():
    cache = _make_cache()
    lease = cache.lease(cache.match(_range(0, 9)))
    assert lease.num_pages == 0
    cache.release(lease)
    with pytest.raises(PageAccountingError, match="released before"):
        cache.release(lease)
    assert cache.stats().asked_tokens == 9


def test_releasing_twice_or_elsewhere_raises_and_changes_nothing():
    cache, other = _make_cache(), _make_cache()
    for each in (cache, other):
        each.insert(_range(0, 8), _pages(1, 2))
    lease = cache.lease(cache.match(_range(0, 9)))
    foreign = other.lease(other.match(_range(0, 9)))
    again = cache.lease(cache.match(_range(0, 9)))
    cache.release(again)
    before = _snapshot(cache)
    with pytest.raises(PageAccountingError, match="released before"):
        cache.release(again)
    with pytest.raises(ValueError, match="lease belongs to another cache"):
        cache.release(foreign)
    with pytest.raises(ValueError, match="lease belongs to another cache"):
        cache.insert(_range(0, 8), _pages(1, 2), lease=foreign)
    with pytest.raises(PageAccountingError, match="released before"):
        cache.insert(_range(0, 8), _pages(1, 2), lease=again)
    assert _snapshot(cache) == before
    cache.release(lease)
    other.release(foreign)


def test_a_match_of_a_changed_tree_or_of_another_cache_cannot_be_leased():
    cache = _make_cache()
    cache.insert(_range(0, 8), _pages(1, 2))
    match = cache.match(_range(0, 9))
    with pytest.raises(ValueError, match="match belongs to another cache"):
        _make_cache().lease(match)
    _evict(cache, 1)
    with pytest.raises(ValueError, match="match again"):
        cache.lease(match)
    assert cache.stats().asked_tokens == 0


# inserting


def test_an_insert_says_which_pages_the_tree_took():
    cache = _make_cache()
    first = cache.insert(_range(0, 8), _pages(1, 2))
    assert first.pages.tolist() == first.adopted.tolist() == [1, 2]
    assert first.surplus.tolist() == []
    assert not first.declined
    second = cache.insert(_range(0, 12), _pages(5, 6, 7))
    assert second.pages.tolist() == [1, 2, 7]
    assert second.adopted.tolist() == [7]
    assert second.surplus.tolist() == [5, 6]
    again = cache.insert(_range(0, 12), _pages(1, 2, 7))
    assert again.pages.tolist() == again.surplus.tolist() == [1, 2, 7]
    assert again.adopted.tolist() == []
    assert cache.pages().tolist() == [1, 2, 7]


def test_leased_pages_are_not_the_callers_to_drop():
    cache = _make_cache()
    cache.insert(_range(0, 8), _pages(1, 2))
    lease = cache.lease(cache.match(_range(0, 9)))
    insertion = cache.insert(_range(0, 12), _pages(1, 2, 3), lease=lease)
    assert insertion.surplus.tolist() == []
    assert insertion.adopted.tolist() == [3]
    assert lease.num_pages == 3
    assert cache.stats().protected_pages.tolist() == [3]


def test_nothing_inserted_is_nothing_changed():
    cache = _make_cache()
    lease = cache.lease(cache.match(_range(0, 3)))
    insertion = cache.insert([], [], lease=lease)
    assert insertion.pages.size == insertion.surplus.size == lease.num_pages == 0
    assert not insertion.declined
    assert tree_nodes(cache) == []


def test_another_rotation_base_is_declined_whole():
    cache = _make_cache(num_shards=4)
    cache.insert(_range(0, 8), _pages(5, 6))
    lease = cache.lease(cache.match(_range(0, 4)))
    before = _snapshot(cache)
    insertion = cache.insert(_range(0, 12), _pages(8, 9, 10), lease=lease)
    assert insertion.declined
    assert insertion.pages.tolist() == [8, 9, 10]
    assert insertion.adopted.size == insertion.surplus.size == lease.num_pages == 0
    assert cache.stats().declined_inserts == 1
    before[0][-1] = 1
    assert _snapshot(cache) == before
    # another first page is another chain, and another namespace another tree
    assert not cache.insert(_range(50, 54), _pages(8)).declined
    assert not cache.insert(_range(0, 4), _pages(12), Namespace(salt="b")).declined


@pytest.mark.parametrize(
    ("tokens", "pages", "error", "message"),
    [
        (_range(0, 12), _pages(5, 6), ValueError, "12 tokens do not fill 2 pages of 4"),
        (_range(0, 6), _pages(5, 6), ValueError, "6 tokens do not fill 2 pages of 4"),
        (_range(0, 8), _pages(5, 5), ValueError, "its owner is 1, not 2"),
        (_range(0, 8), _pages(5, 7), ValueError, "page 7 cannot be page 1 of a chain"),
        (_range(0, 4), _pages(3), ValueError, "page 3 is not a usable page of 4..255"),
        (_range(0, 4), _pages(256), ValueError, "page 256 is not a usable page"),
        (_range(0, 4), _pages(-1), ValueError, "page -1 is not a usable page"),
        (_range(0, 20), _pages(5, 6, 7, 8, 5), ValueError, "page 5 is given twice"),
        (_range(0, 4), np.array([5.0]), TypeError, "pages must be integers"),
        (np.zeros(4), _pages(5), TypeError, "tokens must be integers"),
        (np.zeros(4, bool), _pages(5), TypeError, "tokens must be integers, got bool"),
        (_range(0, 4)[None], _pages(5), ValueError, r"tokens have shape \(1, 4\)"),
        (np.array([0, 1, 2, 2**31]), _pages(5), ValueError, "got 2147483648"),
        (_range(90, 94), _pages(9), PageAccountingError, "page 9 is cached in another"),
        (_range(80, 84), _pages(12), PageAccountingError, "page 12 is cached in"),
    ],
)
def test_a_bad_insert_raises_and_changes_nothing(tokens, pages, error, message):
    cache = _make_cache(num_shards=4)
    cache.insert(_range(80, 96), _pages(9, 10, 11, 12))
    before = _snapshot(cache)
    with pytest.raises(error, match=message):
        cache.insert(tokens, pages)
    assert _snapshot(cache) == before


def test_a_lease_moves_only_along_its_own_chain():
    cache = _make_cache()
    cache.insert(_range(0, 8), _pages(1, 2))
    lease = cache.lease(cache.match(_range(0, 9)))
    before = _snapshot(cache)
    for tokens, pages in (
        (_range(50, 58), _pages(5, 6)),
        (_range(0, 8), _pages(5, 6)),
        (_range(0, 4), _pages(1)),
    ):
        with pytest.raises(ValueError, match="lease holds 2 pages of another chain"):
            cache.insert(tokens, pages, lease=lease)
    assert _snapshot(cache) == before


@pytest.mark.parametrize("num_holders", [1, 2])
def test_a_prompt_inserted_chunk_by_chunk_stays_one_edge(num_holders):
    loop = Loop(2, 30, page_size=2)
    tokens = list(range(40))
    first = loop.open(tokens)
    requests = [first]
    for start in range(0, 40, 4):
        assert loop.compute(first, 4)
        loop.insert(first)
        if start == 0 and num_holders == 2:
            requests.append(loop.open(tokens))
        for other in requests[1:]:
            other.num_computed = first.num_computed
            other.pages = first.pages.copy()
            lease = loop.cache.insert(
                np.array(tokens[: other.num_computed]), other.pages, lease=other.lease
            )
            assert lease.adopted.size == 0
        loop.check()
    assert len(tree_nodes(loop.cache)) == 1


def test_an_edge_is_whole_again_when_its_other_branch_is_gone():
    cache = _make_cache(page_size=1)
    cache.insert(np.array([1, 2, 3, 4]), _pages(1, 2, 3, 4))
    cache.insert(np.array([1, 2, 9]), _pages(1, 2, 5))
    cache.insert(np.array([1, 2, 3, 4]), _pages(1, 2, 3, 4))
    assert len(tree_nodes(cache)) == 3
    assert _evict(cache, 1) == [5]
    assert [node.pages.tolist() for node in tree_nodes(cache)] == [[1, 2, 3, 4]]


# eviction


def test_leaves_go_least_recently_used_first_and_from_their_ends():
    cache = _make_cache()
    cache.insert(_range(0, 8), _pages(1, 2))
    cache.insert(_range(100, 108), _pages(3, 4))
    cache.insert(np.append(_range(0, 4), _range(50, 54)), _pages(1, 5))
    cache.release(cache.lease(cache.match(_range(0, 9))))
    assert _evict(cache, 1) == [4]
    assert _evict(cache, 2) == [3, 5]
    assert _evict(cache, 2) == [2, 1]
    assert _evict(cache, 0) == []
    assert _evict(cache, 1) is None
    assert cache.stats().evicted_pages == 5


@pytest.mark.parametrize(
    ("policy", "order"), [(lru, [2, 3, 1]), (lfu, [3, 2, 1]), (fifo, [1, 2, 3])]
)
def test_policies_order_the_same_uses_in_their_own_ways(policy, order):
    cache = _make_cache(policy=policy)
    for page in (1, 2, 3):
        cache.insert(_range(100 * page, 100 * page + 4), _pages(page))
    for page in (1, 1, 1, 2, 2, 3, 1):
        tokens = _range(100 * page, 100 * page + 5)
        cache.release(cache.lease(cache.match(tokens)))
    assert _evict(cache, 3) == order


def test_a_policy_of_ones_own():
    cache = _make_cache(policy=lambda leaf: -leaf.last_used)
    for page in (1, 2, 3):
        cache.insert(_range(100 * page, 100 * page + 4), _pages(page))
    assert _evict(cache, 3) == [3, 2, 1]


def test_a_leaf_that_ends_on_a_short_owner_goes_before_a_little_older_one():
    cache = _make_cache(num_shards=4)
    cache.insert(_range(0, 16), _pages(4, 5, 6, 7))
    cache.insert(_range(100, 108), _pages(8, 9))
    assert _evict(cache, 0, 1, 0, 0) == [9]
    assert _evict(cache, 1, 0, 0, 0) == [8]
    # now only what would go in vain is left before the owner that is short
    assert _evict(cache, 0, 1, 0, 0) == [7, 6, 5]


def test_a_leaf_that_is_much_older_goes_though_some_pages_go_in_vain():
    cache = _make_cache(num_shards=4)
    cache.insert(_range(0, 16), _pages(4, 5, 6, 7))
    cache.insert(_range(100, 108), _pages(8, 9))
    for _ in range(10):
        cache.release(cache.lease(cache.match(_range(100, 109))))
    assert _evict(cache, 0, 1, 0, 0) == [7, 6, 5]


def test_eviction_stops_at_the_page_that_is_needed_last():
    cache = _make_cache(num_shards=2, page_size=1)
    cache.insert(np.arange(10), _pages(*range(2, 12)))
    assert _evict(cache, 2, 1) == [11, 10, 9, 8]
    assert _evict(cache, 1, 2) == [7, 6, 5]


def test_what_was_evicted_is_not_kept_alive_by_what_was_not():
    cache = _make_cache(page_size=1)
    cache.insert(_range(0, 60), np.arange(1, 61))
    cache.insert(_range(0, 3), np.arange(1, 4))
    for _ in range(57):
        assert _evict(cache, 1) is not None
    arrays = [
        array for node in tree_nodes(cache) for array in (node.tokens, node.pages)
    ]
    assert [array.size for array in arrays] == [3, 3]
    whole = [array if array.base is None else array.base for array in arrays]
    assert all(array.size <= 6 for array in whole)


def test_a_floor_that_cannot_be_met_evicts_nothing():
    cache = _make_cache(num_shards=4)
    cache.insert(_range(0, 12), _pages(4, 5, 6))
    before = _snapshot(cache)
    assert _evict(cache, 1, 1, 1, 1) is None
    assert _evict(cache, 2, 0, 0, 0) is None
    assert _snapshot(cache) == before
    # what is free already counts
    evicted = cache.evict(np.array([1, 1, 1, 1]), np.array([0, 1, 0, 1]))
    assert evicted is not None
    assert evicted.tolist() == [6, 5, 4]


def test_hidden_pages_of_a_short_owner_are_reached_through_what_covers_them():
    cache = _make_cache(num_shards=4, page_size=1)
    cache.insert(np.array([1, 2]), _pages(4, 5))
    for token, page in ((7, 6), (8, 10), (9, 14)):
        cache.insert(np.array([1, 2, token]), _pages(4, 5, page))
    assert _evict(cache, 1, 0, 0, 0) == [6, 10, 14, 5, 4]
    assert tree_nodes(cache) == []


@pytest.mark.parametrize(
    ("wanted", "free", "name"),
    [([1], [0, 0], "wanted"), ([1, 1], [0], "free"), (1, [0, 0], "wanted")],
)
def test_counts_of_another_shape_are_refused(wanted, free, name):
    with pytest.raises(ValueError, match=f"{name} has shape"):
        _make_cache(num_shards=2).evict(np.array(wanted), np.array(free))


def test_a_page_that_a_fork_holds_stays_allocated_when_evicted():
    loop = Loop(1, 4)
    parent = _serve(loop, list(range(8)))
    fork = loop.fork(parent)
    loop.finish(parent)
    loop.check()
    other = loop.open(list(range(50, 62)))
    assert not loop.compute(other, 12)
    loop.check()
    assert loop.compute(other, 8)
    loop.check()
    assert fork.pages.tolist() == [1, 2]
    loop.finish(fork)
    assert loop.compute(other, 4)
    loop.check()


def test_clear_gives_all_pages_back_unless_some_are_leased():
    cache = _make_cache()
    cache.insert(_range(0, 8), _pages(1, 2))
    cache.insert(_range(50, 54), _pages(3), Namespace(adapter_id=1))
    lease = cache.lease(cache.match(_range(0, 5)))
    before = _snapshot(cache)
    with pytest.raises(PageAccountingError, match="1 pages are leased"):
        cache.clear()
    assert _snapshot(cache) == before
    cache.release(lease)
    assert cache.clear().tolist() == [1, 2, 3]
    assert cache.pages().size == 0
    assert cache.evictable_per_owner().tolist() == [0]
    cache.insert(_range(0, 8), _pages(3, 4))
    assert cache.match(_range(0, 9)).pages.tolist() == [3, 4]


# namespaces, counts


def test_namespaces_do_not_see_each_other():
    cache = _make_cache()
    spaces = [
        Namespace(),
        Namespace(salt="1"),
        Namespace(adapter_id=1),
        Namespace(adapter_id="1"),
        Namespace(multimodal_hash="1"),
        Namespace(multimodal_hash=b"1"),
        Namespace(salt="1", adapter_id=1),
    ]
    for index, space in enumerate(spaces):
        assert cache.match(_range(0, 5), space).num_tokens == 0
        cache.insert(_range(0, 4), _pages(index + 1), space)
    found = [cache.match(_range(0, 5), space).pages.tolist() for space in spaces]
    assert found == [[1], [2], [3], [4], [5], [6], [7]]
    assert cache.match(_range(0, 5), Namespace(salt="1")).pages.tolist() == [2]


@pytest.mark.parametrize("namespace", ["tenant", None, ("tenant", 1)])
def test_a_namespace_of_another_type_is_refused(namespace):
    cache = _make_cache()
    with pytest.raises(TypeError, match="must be a Namespace"):
        cache.match(_range(0, 5), namespace)
    with pytest.raises(TypeError, match="must be a Namespace"):
        cache.insert(_range(0, 4), _pages(1), namespace)


def test_counts_of_hits_pages_and_evictions():
    cache = _make_cache(num_shards=2)
    cache.insert(_range(0, 12), _pages(3, 4, 5))
    lease = cache.lease(cache.match(_range(0, 10)))
    stats = cache.stats()
    assert stats.cached_pages.tolist() == [1, 2]
    assert stats.protected_pages.tolist() == [1, 1]
    assert (stats.asked_tokens, stats.hit_tokens) == (10, 8)
    cache.release(lease)
    assert _evict(cache, 0, 1) == [5]
    assert cache.stats().evicted_pages == 1
    stats.cached_pages[:] = 99
    assert cache.stats().cached_pages.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["num_shards", "pages_per_shard", "page_size"])
def test_a_size_below_one_is_refused(name):
    sizes = {"num_shards": 1, "pages_per_shard": 1, "page_size": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        PrefixCache(sizes["num_shards"], sizes["pages_per_shard"], sizes["page_size"])


# the public bug reports (cases A02, A03, A09)


def test_a02_a_release_in_two_pieces_that_meet_inside_a_wide_page():
    loop = Loop(1, 4, page_size=16)
    request = _serve(loop, list(range(40)))
    loop.cache.insert(_range(0, 16), request.pages[:1], lease=request.lease)
    assert loop.allocator.available_pages() == 1
    # tokens 16-23 and 24-39 are pieces of one chain: pages, not token ranges, are freed
    loop.abort(request)
    assert loop.allocator.available_pages() == 3
    again = loop.allocator.allocate(3)
    assert again is not None
    assert len(set(again.tolist())) == 3
    assert not set(again.tolist()) & set(loop.cache.pages().tolist())


def test_a02_a_release_in_two_pieces_that_meet_inside_a_page():
    loop = Loop(4, 4)
    request = _serve(loop, list(range(40)), first_owner=0)
    loop.cache.insert(_range(0, 16), request.pages[:4], lease=request.lease)
    before = loop.allocator.free_per_owner()
    private = request.private
    loop.abort(request)
    assert (loop.allocator.free_per_owner() - before).tolist() == [2, 2, 1, 1]
    loop.check()
    free = loop.allocator.free_per_owner().tolist()
    for piece in (private[:2], private[1:]):
        with pytest.raises(PageAccountingError):
            loop.allocator.free(piece)
    assert loop.allocator.free_per_owner().tolist() == free


def test_a03_an_unfinished_request_lets_go_of_the_pages_it_gave_up():
    loop = Loop(1, 12)
    tokens = list(range(14))
    spare = loop.allocator.allocate(4)
    assert spare is not None
    x = loop.open(tokens[:12])
    y = loop.open(tokens)
    assert loop.compute(x, 12)
    assert loop.compute(y, 14)
    assert x.pages.tolist() == [5, 6, 7]
    assert y.pages.tolist() == [8, 9, 10, 11]
    loop.allocator.free(spare)
    loop.finish(x)
    insertion = loop.insert(y)
    assert insertion.surplus.tolist() == [8, 9, 10]
    assert y.pages.tolist() == [5, 6, 7, 11]
    assert loop.allocator.available_pages() == 8
    assert loop.cache.stats().protected_pages.tolist() == [3]
    loop.check()
    # another takes 8, 9, 10 and writes noise; the next tokens go into page 11
    z = loop.open([77] * 12)
    assert loop.compute(z, 12)
    assert sorted(z.pages.tolist()) == [8, 9, 10]
    y.tokens += [90, 91]
    assert loop.compute(y, 2)
    assert y.pages.tolist() == [5, 6, 7, 11]
    loop.check()


def test_a03_with_another_rotation_base_the_request_keeps_all_its_pages():
    loop = Loop(4, 6)
    tokens = list(range(14))
    x = loop.open(tokens[:12])
    y = loop.open(tokens)
    assert loop.compute(x, 12, first_owner=1)
    assert loop.compute(y, 14, first_owner=2)
    loop.finish(x)
    own = y.pages.tolist()
    assert loop.insert(y).declined
    assert y.pages.tolist() == own
    loop.check()
    y.tokens += [90, 91, 92]
    assert loop.compute(y, 3)
    loop.check()
    loop.finish(y)
    loop.check()
    assert loop.cache.stats().declined_inserts == 2
    assert loop.allocator.free_per_owner().sum() == 24 - 3


def test_a09_a_page_whose_last_slot_was_never_computed_is_not_cached():
    loop = Loop()
    request = _serve(loop, list(range(6)))
    request.tokens += [6, 7]
    assert loop.compute(request, 1)
    loop.finish(request)
    assert loop.cache.pages().size == 1
    assert loop.open([*range(8), 50, 51, 52]).lease.num_pages == 1
    loop.check()


def test_a09_a_page_whose_last_slot_was_computed_is_cached():
    loop = Loop()
    loop.finish(_serve(loop, list(range(8))))
    assert loop.cache.pages().size == 2
    assert loop.open([*range(8), 50]).lease.num_pages == 2


def test_a09_an_abort_may_keep_the_pages_that_are_whole():
    loop = Loop()
    request = loop.open(list(range(12)))
    assert loop.compute(request, 5)
    loop.finish(request)
    assert loop.cache.pages().size == 1
    loop.check()
