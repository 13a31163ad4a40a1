"""The chains of all requests: who holds which page, from open to close.

    free lists <--- draw / free ---> private pages of a request
        ^                                 |  commit of a chunk, close, preempt
        |  evict                          v  (whole pages, every slot computed)
        +------------------------- pages of the prefix cache <--- match + lease

Every usable page is in exactly one of the three places, each hold counted by the
allocator: one for the tree, one for each request that holds the page privately. A
request reads the tree's pages under its lease. All decisions are pure functions of the
calls made, so that mirrored hosts make the same ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxkv import placement
from jaxkv.host.allocator import PageAllocator
from jaxkv.host.events import EventSink
from jaxkv.host.eviction import Policy, lru
from jaxkv.host.handles import Insertion, Match
from jaxkv.host.namespace import DEFAULT_NAMESPACE, Namespace
from jaxkv.host.prefix_cache import PrefixCache
from jaxkv.host.request import Request, RequestTable


class CacheStats(NamedTuple):
    """Pages now, and counts since the cache was made."""

    free_pages: np.ndarray  # int32[num_shards]
    cached_pages: np.ndarray  # int32[num_shards] in the prefix cache
    protected_pages: np.ndarray  # int32[num_shards] of those, under a lease
    private_pages: np.ndarray  # int32[num_shards] of requests only
    asked_tokens: int  # of opened and resumed prompts
    hit_tokens: int  # of those, found in the prefix cache
    computed_tokens: int  # by committed steps
    evicted_tokens: int  # dropped from the prefix cache for room
    declined_inserts: int  # chains that joined no other for their rotation base
    preemptions: int
    compilations: int = 0  # by XLA in this process, of whatever function


class Fork(NamedTuple):
    """Continuations of a request, and the pages to copy for them."""

    requests: list[Request]
    src_pages: np.ndarray  # int32[num_copies] logical
    dst_pages: np.ndarray  # int32[num_copies] logical, of the same owners


class Chains:
    """Requests, free lists and prefix cache of one shard group, moved together.

    Attributes:
      table: the open requests.
      allocator: free lists and holds.
      prefix_cache: the radix tree; None if prefixes are not kept.
    """

    def __init__(
        self,
        num_shards: int,
        pages_per_shard: int,
        page_size: int,
        *,
        reserve_pages: int = 0,
        keep_prefixes: bool = True,
        policy: Policy = lru,
        sink: EventSink | None = None,
    ):
        """Makes the host side of an empty cache.

        Args:
          num_shards: shards of the group.
          pages_per_shard: physical pages a shard, the reserved page included.
          page_size: tokens a page.
          reserve_pages: pages beyond its prompt that admission keeps for each request.
          keep_prefixes: whether computed pages stay for requests to come.
          policy: what the prefix cache evicts first.
          sink: called with each KV event.
        """
        if reserve_pages < 0:
            raise ValueError(f"{reserve_pages=} must be at least 0")
        self.table = RequestTable(num_shards, page_size)
        self.allocator = PageAllocator(num_shards, pages_per_shard)
        self.prefix_cache = PrefixCache(
            num_shards, pages_per_shard, page_size, policy=policy, sink=sink
        )
        self._keep_prefixes = keep_prefixes
        self._reserve_pages = reserve_pages
        self._computed_tokens = 0
        self._preemptions = 0

    def open(
        self, tokens: np.ndarray, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> Request | None:
        """Starts a request over int32 tokens; None where there is no room now."""
        if not isinstance(namespace, Namespace):
            raise TypeError(f"{namespace=} must be a Namespace")
        request = self.table.open(tokens, namespace)
        if self.resume(request):
            return request
        self.table.close(request)
        return None

    def resume(self, request: Request) -> bool:
        """Gives a request without pages its cached prefix; False: no room for it now.

        Room is what the chain can still draw, evictable pages included, less what
        other requests were admitted for and have not drawn yet.
        """
        prefix_cache, table = self.prefix_cache, self.table
        match = prefix_cache.match(request.tokens, request.namespace)
        total = int(table.pages_needed(table.num_tokens[request.slot]))
        needed = total - match.num_pages + self._promised() + self._reserve_pages
        # a request alone has nothing to wait for, and whatever is cached can go
        alone = all(other.lease is None for other in table.requests.values())
        room = self._room(without=match)
        if not alone and needed > table.num_shards * int(room.min()):
            return False
        request.lease = prefix_cache.lease(match)
        request.is_declined = False
        table.extend_chain(request, match.pages)
        table.advance([request], np.array([match.num_tokens], np.int32))
        return True

    def draw(self, requests: Sequence[Request], lens: np.ndarray) -> bool:
        """Extends chains to hold int32 `lens` tokens each, all or none.

        Evicts cached pages as needed. False where even that gives no room.
        """
        table = self.table
        slots = np.array([request.slot for request in requests], np.int32)
        missing = np.maximum(table.pages_needed(lens) - table.num_pages[slots], 0)
        growing = np.flatnonzero(missing).tolist()
        if not growing:
            return True
        # a new chain can start anywhere: let it not take what an old one must have
        growing.sort(key=lambda index: table.num_pages[slots[index]] == 0)
        draws = []
        for index in growing:
            held = int(table.num_pages[slots[index]])
            owner = (int(table.base[slots[index]]) + held) % table.num_shards
            draws.append((int(missing[index]), owner if held else None))
        drawn = self._allocate(draws)
        if drawn is None:
            return False
        for index, pages in zip(growing, drawn, strict=True):
            table.extend_chain(requests[index], pages)
        return True

    def advance(self, requests: Sequence[Request], counts: np.ndarray) -> None:
        """Counts int32 new tokens as computed; a chunk's whole pages can be reused."""
        self.table.advance(requests, counts)
        self._computed_tokens += int(counts.sum())
        for request, count in zip(requests, counts.tolist(), strict=True):
            if count > 1:
                self._cache_pages(request)

    def fork(self, request: Request, num_forks: int) -> Fork | None:
        """Starts continuations that share full pages; None where pages are short."""
        table = self.table
        full, rest = divmod(request.num_computed, table.page_size)
        chain = request.pages()
        copies = [np.zeros(0, np.int32)] * num_forks
        if rest:
            owner = int(chain[full]) % table.num_shards
            drawn = self._allocate([(1, owner)] * num_forks)
            if drawn is None:
                return None
            copies = drawn
        forks = []
        for copied in copies:
            fork = table.open(request.tokens.copy(), request.namespace)
            # its own holds: it needs no place in the tree to keep these pages
            fork.lease = self.prefix_cache.lease(
                self.prefix_cache.match(request.tokens[:0], request.namespace)
            )
            self.allocator.share(chain[:full])
            table.extend_chain(fork, np.concatenate([chain[:full], copied]))
            table.advance([fork], np.array([request.num_computed], np.int32))
            forks.append(fork)
        dst = np.concatenate(copies)
        src = chain[full : full + 1] if rest else chain[:0]
        return Fork(forks, np.repeat(src, num_forks), dst)

    def preempt(self, request: Request) -> None:
        """Drops a request's pages and keeps its tokens; whole pages stay cached."""
        self._release(request)
        self.table.drop_chain(request)
        self._preemptions += 1

    def close(self, request: Request) -> None:
        """Ends a request; whole computed pages stay cached, the others are freed."""
        if request.lease is not None:
            self._release(request)
        self.table.close(request)

    def available_pages(self) -> int:
        """Pages that a chain could draw now, evictable ones included (class floor)."""
        return self.table.num_shards * int(self._room().min())

    def clear(self) -> None:
        """Empties the prefix cache.

        Raises:
          PageAccountingError: open requests lease pages of it; nothing has changed.
        """
        self.allocator.free(self.prefix_cache.clear())

    def stats(self) -> CacheStats:
        """Pages by state, and counts."""
        prefix = self.prefix_cache.stats()
        free = self.allocator.free_per_owner()
        usable = self.allocator.pages_per_shard - 1
        return CacheStats(
            free_pages=free,
            cached_pages=prefix.cached_pages,
            protected_pages=prefix.protected_pages,
            private_pages=usable - free - prefix.cached_pages,
            asked_tokens=prefix.asked_tokens,
            hit_tokens=prefix.hit_tokens,
            computed_tokens=self._computed_tokens,
            evicted_tokens=prefix.evicted_pages * self.table.page_size,
            declined_inserts=prefix.declined_inserts,
            preemptions=self._preemptions,
        )

    def _room(self, without: Match | None = None) -> np.ndarray:
        """Pages that are free or can be evicted and then are free, int[num_shards].

        Args:
          without: a match whose pages are to stay.
        """
        prefix_cache = self.prefix_cache
        room = self.allocator.free_per_owner()
        room += prefix_cache.evictable_per_owner(without)
        shared = self.allocator.shared_pages()
        if shared.size:
            # a fork's hold outlives the tree's: evicting such a page frees nothing
            kept = [] if without is None else [without.pages]
            for request in self.table.requests.values():
                if request.lease is not None:
                    num_leased = request.lease.num_pages
                    kept.append(self.table.chain(request.slot, num_leased))
            evictable = np.setdiff1d(prefix_cache.pages(), np.concatenate(kept))
            stuck = np.intersect1d(shared, evictable)
            owners = placement.owner(stuck, self.table.num_shards)
            room -= np.bincount(owners, minlength=room.size).astype(room.dtype)
        return room

    def _promised(self) -> int:
        """Pages that admitted requests have not drawn yet, for tokens they have."""
        table = self.table
        missing = np.maximum(table.pages_needed(table.num_tokens) - table.num_pages, 0)
        waiting = [r.slot for r in table.requests.values() if r.lease is None]
        return int(missing.sum() - missing[waiting].sum())

    def _allocate(self, draws: list[tuple[int, int | None]]) -> list[np.ndarray] | None:
        """Makes draws, all or none, evicting what is in the way."""
        drawn = self.allocator.allocate_batch(draws)
        if drawn is not None:
            return drawn
        num_shards = self.table.num_shards
        free = self.allocator.free_per_owner()
        room = self._room()
        wanted = np.zeros(num_shards, np.int64)
        shards = np.arange(num_shards)
        rooted = []
        for num_pages, owner in draws:
            # a new chain starts where most is left, counting what can be evicted
            root = int((room - wanted).argmax()) if owner is None else owner
            wanted += placement.pages_per_owner(num_pages, root, shards, num_shards)
            rooted.append((num_pages, root))
        if (wanted > room).any():
            return None
        while (wanted > free).any():
            evicted = self.prefix_cache.evict(wanted, free)
            if evicted is None:
                return None
            self.allocator.free(evicted)
            # a page that a fork holds too has left the tree and is not free
            free = self.allocator.free_per_owner()
        return self.allocator.allocate_batch(rooted)

    def _cache_pages(self, request: Request) -> None:
        """Puts a request's whole computed pages into the tree, under its lease."""
        if not self._keep_prefixes or request.is_declined or request.lease is None:
            return
        num_pages = request.num_computed // self.table.page_size
        if num_pages <= request.lease.num_pages:
            return
        insertion = self.prefix_cache.insert(
            request.tokens[: num_pages * self.table.page_size],
            self.table.chain(request.slot, num_pages),
            request.namespace,
            request.lease,
        )
        self._take(request, insertion)

    def _take(self, request: Request, insertion: Insertion) -> None:
        request.is_declined = insertion.declined
        if not insertion.declined:
            # before its duplicates are freed, so that it never points at a free page
            self.table.repoint_chain(request, insertion.pages)
            self.allocator.free(insertion.surplus)

    def _release(self, request: Request) -> None:
        """Caches what can be, and gives back lease and private pages."""
        assert request.lease is not None
        self._cache_pages(request)
        private = request.pages()[request.lease.num_pages :]
        self.prefix_cache.release(request.lease)
        request.lease = None
        request.epoch += 1
        self.allocator.free(private)
