"""A serving loop without a device, and everything that must hold after each step.

The pool is a dict from a page to what it was computed for: the namespace and all tokens
up to the last one written there. A request whose table names a page of anything else
would read another's keys.
"""

import dataclasses
from collections import Counter

import numpy as np

from jaxkv import placement
from jaxkv.host.allocator import PageAllocator
from jaxkv.host.eviction import NOT_QUEUED, Policy, lru
from jaxkv.host.handles import Insertion, Lease
from jaxkv.host.namespace import DEFAULT_NAMESPACE, Namespace
from jaxkv.host.prefix_cache import PrefixCache
from jaxkv.host.radix_tree import Node


@dataclasses.dataclass(eq=False)
class LoopRequest:
    tokens: list[int]
    namespace: Namespace
    lease: Lease
    pages: np.ndarray
    num_computed: int

    @property
    def private(self) -> np.ndarray:
        return self.pages[self.lease.num_pages :]


class Loop:
    def __init__(
        self,
        num_shards: int = 1,
        usable: int = 12,
        page_size: int = 4,
        policy: Policy = lru,
        sink=None,
    ):
        self.allocator = PageAllocator(num_shards, usable + 1)
        self.cache = PrefixCache(
            num_shards, usable + 1, page_size, policy=policy, sink=sink
        )
        self.num_shards = num_shards
        self.page_size = page_size
        self.requests: list[LoopRequest] = []
        self.pool: dict[int, tuple[Namespace, tuple[int, ...]]] = {}

    def open(
        self, tokens: list[int], namespace: Namespace = DEFAULT_NAMESPACE
    ) -> LoopRequest:
        match = self.cache.match(np.array(tokens), namespace)
        foreseen = self.cache.evictable_per_owner(without=match).tolist()
        lease = self.cache.lease(match)
        assert self.cache.evictable_per_owner().tolist() == foreseen
        request = LoopRequest(
            list(tokens), namespace, lease, match.pages, match.num_tokens
        )
        self.requests.append(request)
        return request

    def compute(
        self, request: LoopRequest, count: int, first_owner: int | None = None
    ) -> bool:
        """Computes the next tokens; False where there is no room for them."""
        end = request.num_computed + count
        assert end <= len(request.tokens)
        missing = -(-end // self.page_size) - request.pages.size
        if missing > 0:
            if request.pages.size:
                first_owner = (int(request.pages[-1]) + 1) % self.num_shards
            drawn = self.draw(missing, first_owner)
            if drawn is None:
                return False
            request.pages = np.concatenate([request.pages, drawn])
        for position in range(request.num_computed, end):
            written = tuple(request.tokens[: position + 1])
            page = int(request.pages[position // self.page_size])
            self.pool[page] = request.namespace, written
        request.num_computed = end
        return True

    def draw(self, num_pages: int, first_owner: int | None) -> np.ndarray | None:
        """Pages, evicting as needed; more than once where forks hold evicted pages."""
        if first_owner is None:
            first_owner = self.allocator.best_root()
        shards = np.arange(self.num_shards)
        wanted = placement.pages_per_owner(
            num_pages, first_owner, shards, self.num_shards
        )
        while (wanted > self.allocator.free_per_owner()).any():
            evicted = self.cache.evict(wanted, self.allocator.free_per_owner())
            if evicted is None:
                return None
            self.allocator.free(evicted)
        return self.allocator.allocate(num_pages, first_owner)

    def insert(self, request: LoopRequest) -> Insertion:
        """Caches what is computed, whole pages only, and re-points the request."""
        count = request.num_computed // self.page_size
        tokens = np.array(request.tokens[: count * self.page_size], np.int32)
        insertion = self.cache.insert(
            tokens, request.pages[:count], request.namespace, request.lease
        )
        request.pages = np.concatenate([insertion.pages, request.pages[count:]])
        self.allocator.free(insertion.surplus)
        return insertion

    def finish(self, request: LoopRequest) -> None:
        self.insert(request)
        self.abort(request)

    def abort(self, request: LoopRequest) -> None:
        self.allocator.free(request.private)
        self.cache.release(request.lease)
        self.requests.remove(request)

    def fork(self, request: LoopRequest) -> LoopRequest:
        """A continuation that shares the full pages, the leased ones by a lease."""
        full = request.num_computed // self.page_size
        num_leased = request.lease.num_pages
        tokens = np.array([*request.tokens[: num_leased * self.page_size], 0])
        lease = self.cache.lease(self.cache.match(tokens, request.namespace))
        assert lease.num_pages == num_leased
        self.allocator.share(request.pages[num_leased:full])
        fork = LoopRequest(
            list(request.tokens),
            request.namespace,
            lease,
            request.pages[:full],
            full * self.page_size,
        )
        self.requests.append(fork)
        return fork

    def longest_cached(self, tokens: list[int], namespace: Namespace) -> int:
        """Whole cached pages before the last token, found by looking at every page."""
        cached = {self.pool[page] for page in self.cache.pages().tolist()}
        count = 0
        while (count + 1) * self.page_size < len(tokens):
            prefix = tuple(tokens[: (count + 1) * self.page_size])
            if (namespace, prefix) not in cached:
                break
            count += 1
        return count

    def check(self) -> None:
        self._check_pages()
        self._check_tables()
        self._check_tree()

    def _check_pages(self) -> None:
        """Free + cached + private is all, and every hold has its holder."""
        holders = Counter(self.cache.pages().tolist())
        assert all(count == 1 for count in holders.values())
        for request in self.requests:
            holders.update(request.private.tolist())
        usable = np.arange(
            self.num_shards, self.num_shards * self.allocator.pages_per_shard
        )
        holds = self.allocator.holds(usable).tolist()
        assert holds == [holders[page] for page in usable.tolist()]
        assert self.allocator.free_per_owner().sum() == holds.count(0)

    def _check_tables(self) -> None:
        """Every slot that a request will read holds its own tokens' keys."""
        for request in self.requests:
            owners = request.pages % self.num_shards
            assert (np.diff(owners) % self.num_shards == 1 % self.num_shards).all()
            for index, page in enumerate(request.pages.tolist()):
                end = min((index + 1) * self.page_size, request.num_computed)
                namespace, written = self.pool[page]
                assert namespace == request.namespace
                assert list(written[:end]) == request.tokens[:end]
                assert len(written) >= end

    def _check_tree(self) -> None:
        nodes = tree_nodes(self.cache)
        ends = Counter(request.lease._node for request in self.requests)
        cached, protected = [], []
        for node in nodes:
            path = list(node.path())[::-1]
            pages = np.concatenate([step.pages for step in path])
            tokens = np.concatenate([step.tokens for step in path]).tolist()
            assert node.pages.size > 0
            assert node.tokens.size == node.pages.size * self.page_size
            assert node.base == pages[0] % self.num_shards
            expected = (node.base + np.arange(pages.size)) % self.num_shards
            assert (pages % self.num_shards).tolist() == expected.tolist()
            for index, page in enumerate(pages.tolist()):
                prefix = tuple(tokens[: (index + 1) * self.page_size])
                assert self.pool[page] == (node.namespace, prefix)
            below = sum(child.leases for child in node.children.values())
            assert node.leases == below + ends[node]
            is_evictable = not node.leases and not node.children
            assert (node.ticket != NOT_QUEUED) == is_evictable
            for child in node.children.values():
                assert child.parent is node
                assert child.last_used <= node.last_used
            cached += node.pages.tolist()
            protected += node.pages.tolist() if node.leases else []
        stats = self.cache.stats()
        assert sorted(cached) == self.cache.pages().tolist()
        assert stats.cached_pages.tolist() == self._per_owner(cached)
        assert stats.protected_pages.tolist() == self._per_owner(protected)
        assert len(self.cache._queue) == sum(n.ticket != NOT_QUEUED for n in nodes)

    def _per_owner(self, pages: list[int]) -> list[int]:
        counts = [0] * self.num_shards
        for page in pages:
            counts[page % self.num_shards] += 1
        return counts


def tree_nodes(cache: PrefixCache) -> list[Node]:
    """All nodes of a cache but the roots."""
    nodes = []
    for root in cache._tree._roots.values():
        assert root.children
        waiting = list(root.children.values())
        while waiting:
            node = waiting.pop()
            nodes.append(node)
            waiting += node.children.values()
    return nodes
