"""The prefix cache: leases, owners and eviction on a radix tree of pages.

    match(tokens) -> lease -> insert(tokens, pages, lease) ... -> release
                              evict(wanted, free) -> pages      the caller frees them

    root --- 4 5 --- 6 7 8        pages of N = 4 shards; owners 0 1 | 2 3 0
        2 leases |   1 lease      a lease counts on its node and all above, so whatever
                 '-- 10 11        hangs below an unleased node is unleased too
                     0 leases     evictable: 11 first, then 10

Owners are cyclic along every path: all chains below one first page share its rotation
base, and an insert of pages with another base is declined whole. A page in the tree
carries one hold of the allocator, which the tree takes over on insert and hands back on
eviction: the tree returns pages, it never frees them.

Every method is a pure function of the calls before it; no clock, no hash order.
"""

import numpy as np

from jaxkv.errors import PageAccountingError
from jaxkv.host.checks import Ids, check_chain, checked_ids
from jaxkv.host.events import (
    CacheCleared,
    EventSink,
    PagesRemoved,
    PagesStored,
    page_hashes,
)
from jaxkv.host.eviction import EvictionQueue, Policy, lru, reach
from jaxkv.host.handles import Insertion, Lease, Match, PrefixStats
from jaxkv.host.namespace import DEFAULT_NAMESPACE, Namespace
from jaxkv.host.radix_tree import Node, RadixTree, Walk


class PrefixCache:
    """A radix tree from tokens to the pages that hold their KV.

    Attributes:
      num_shards: shards of the group.
      page_size: tokens a page.
    """

    def __init__(
        self,
        num_shards: int,
        pages_per_shard: int,
        page_size: int,
        *,
        policy: Policy = lru,
        sink: EventSink | None = None,
    ):
        """Makes an empty cache.

        Args:
          num_shards: shards of the group.
          pages_per_shard: physical pages a shard, the reserved page included.
          page_size: tokens a page.
          policy: what to evict first; see `jaxkv.host.eviction`.
          sink: called with each event, after the change, and must not raise; page
            hashes are computed only where there is one.

        Raises:
          ValueError: a size is less than 1.
        """
        sizes = {
            "num_shards": num_shards,
            "pages_per_shard": pages_per_shard,
            "page_size": page_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        self.num_shards = num_shards
        self.page_size = page_size
        self._policy = policy
        self._sink = sink
        self._is_cached = np.zeros(num_shards * pages_per_shard, bool)
        # a run of n pages from owner f has (n + rounding[f, s]) // num_shards on s
        shards = np.arange(num_shards, dtype=np.int32)
        self._rounding = num_shards - 1 - (shards - shards[:, None]) % num_shards
        self._uses = 0
        self._version = 0
        self._asked_tokens = self._hit_tokens = 0
        self._evicted_pages = self._declined_inserts = 0
        self._reset()

    def match(self, tokens: Ids, namespace: Namespace = DEFAULT_NAMESPACE) -> Match:
        """Finds the longest cached prefix; changes nothing, not even what is recent.

        Whole pages only, and never the whole prompt: its last token has to be computed.

        Args:
          tokens: the prompt's token ids, integers [num_tokens].
          namespace: where to look.

        Returns:
          The match, perhaps of no pages. Lease it before the tree changes.

        Raises:
          TypeError, ValueError: the tokens are no token ids in one axis.
        """
        tokens = checked_ids(tokens, "tokens")
        _check_namespace(namespace)
        limit = max(tokens.size - 1, 0) // self.page_size
        walk = self._tree.descend(tokens[: limit * self.page_size], namespace)
        num_tokens = walk.pages.size * self.page_size
        return Match(
            walk.pages,
            num_tokens,
            tokens.size,
            walk.node if walk.pages.size else None,
            walk.inside,
            self,
            self._version,
        )

    def lease(self, match: Match) -> Lease:
        """Protects a match's pages from eviction, and marks them as used.

        Raises:
          ValueError: the match is another cache's, or the tree has changed since.
        """
        if match._cache is not self:
            raise ValueError("the match belongs to another cache")
        if match._version != self._version:
            raise ValueError(
                f"the match was made at version {match._version} of the tree, which is "
                f"now at {self._version}: match again"
            )
        self._asked_tokens += match.num_asked
        self._hit_tokens += match.num_tokens
        self._uses += 1
        node = match._node
        if node is not None:
            if match._inside < node.pages.size:
                node = self._split(node, match._inside)
            for above in node.path():
                above.last_used = self._uses
                above.num_uses += 1
            self._protect(node, None)
        return Lease(match.num_pages, node, self)

    def release(self, lease: Lease) -> None:
        """Gives a lease back.

        Raises:
          ValueError: the lease is another cache's.
          PageAccountingError: it was released before.
        """
        self._check_lease(lease)
        lease.is_released = True
        if lease._node is None:
            return
        freed = []
        for node in lease._node.path():
            node.leases -= 1
            if not node.leases:
                freed.append(node)
        if freed:
            self._protected -= self._owners_of(freed)
            self._queue_if_evictable(freed[0])
        self._join(lease._node)

    def insert(
        self,
        tokens: Ids,
        pages: Ids,
        namespace: Namespace = DEFAULT_NAMESPACE,
        lease: Lease | None = None,
    ) -> Insertion:
        """Caches a chain's first pages, of a finished request or of one under way.

        Pass only pages of which every slot was computed.

        Args:
          tokens: token ids, integers [num_pages * page_size].
          pages: the chain's logical pages in position order, integers [num_pages].
          namespace: where to put them.
          lease: the caller's lease, which then moves to the end of the inserted chain.
            Its pages are the tree's; those after it must each carry a hold of the
            caller. Without a lease all pages must.

        Returns:
          Which pages the chain consists of now, and which holds went where. Declined,
          and nothing changed, where the chain would join has another rotation base.

        Raises:
          ValueError: the tokens do not fill the pages exactly, the owners are not
            cyclic, an id is out of range, reserved or given twice, or the lease is of
            another chain.
          TypeError: tokens or pages are not integers.
          PageAccountingError: a page is cached in another place, or the lease was
            released. Nothing has changed.
        """
        tokens = checked_ids(tokens, "tokens")
        pages = checked_ids(pages, "pages")
        check_chain(pages, self.num_shards, self._is_cached.size)
        if tokens.size != pages.size * self.page_size:
            raise ValueError(
                f"{tokens.size} tokens do not fill {pages.size} pages of "
                f"{self.page_size}: insert whole pages only, each with all its tokens"
            )
        _check_namespace(namespace)
        if lease is not None:
            self._check_lease(lease)
        walk = self._tree.descend(tokens, namespace)
        num_known = walk.pages.size
        num_leased = lease.num_pages if lease is not None else 0
        leased = walk.pages[:num_leased]
        if leased.size < num_leased or (pages[:num_leased] != leased).any():
            raise ValueError(
                f"the lease holds {num_leased} pages of another chain than the "
                f"{pages.size} inserted"
            )
        self._check_adoptable(pages, walk.pages, num_leased)
        if num_known and walk.pages[0] % self.num_shards != pages[0] % self.num_shards:
            self._declined_inserts += 1
            return Insertion(pages, pages[:0], pages[:0], True)
        if not pages.size:
            return Insertion(pages, pages, pages, False)
        adopted = pages[num_known:]
        above = self._use_path(walk, namespace)
        end = above
        if adopted.size:
            end = self._extend(above, tokens[num_known * self.page_size :], adopted)
        self._queue_if_evictable(end)
        event = self._stored_event(above, end) if adopted.size else None
        if lease is not None:
            left = lease._node
            self._protect(end, left)
            lease._node, lease.num_pages = end, pages.size
            if left is not end:
                self._join(left)
        self._join(above)
        chain = np.concatenate([walk.pages, adopted])
        surplus = pages[num_leased:num_known]
        if self._sink is not None and event is not None:
            self._sink(event)
        return Insertion(chain, adopted, surplus, False)

    def evict(self, wanted: np.ndarray, free: np.ndarray) -> np.ndarray | None:
        """Takes unleased pages out of the tree until every owner has enough.

        Leaves go in the order of the policy, weighed against pages that would go in
        vain (`jaxkv.host.eviction`), and lose no more of their ends than is needed.

        Args:
          wanted: pages that are to be free, integers [num_shards].
          free: pages that are free (`PageAllocator.free_per_owner`).

        Returns:
          Logical pages, int32; the tree's hold on each is the caller's to free. A page
          that something else holds as well does not become free: look again at what
          is free, and call again. None where evicting everything would not do, and
          then nothing has changed.

        Raises:
          ValueError: an argument has another shape.
        """
        for name, counts in (("wanted", wanted), ("free", free)):
            if np.shape(counts) != (self.num_shards,):
                raise ValueError(
                    f"{name} has shape {np.shape(counts)}, expected one count for each "
                    f"of {self.num_shards} owners"
                )
        short = np.maximum(np.asarray(wanted) - np.asarray(free), 0)
        if (short > self.evictable_per_owner()).any():
            return None
        taken = [np.zeros(0, np.int32)]
        hashes: list[bytes] = []
        while np.count_nonzero(short):
            leaf = self._queue.pop(short)
            assert leaf is not None, f"{short=} pages are neither leased nor queued"
            count = reach(leaf.pages, short)
            if self._sink is not None:
                hashes += leaf.hashes[: -count - 1 : -1]
            removed = leaf.pages[: -count - 1 : -1]
            self._trim(leaf, count)
            owners = self._spread(int(removed[-1]), count)
            self._cached -= owners
            short = np.maximum(short - owners, 0)
            taken.append(removed)
        evicted = np.concatenate(taken)
        self._is_cached[evicted] = False
        self._evicted_pages += evicted.size
        if self._sink is not None and evicted.size:
            self._sink(PagesRemoved(page_hashes=tuple(hashes)))
        return evicted

    def clear(self) -> np.ndarray:
        """Empties the tree; its holds on the returned pages, int32, are the caller's.

        Raises:
          PageAccountingError: pages are leased. Nothing has changed.
        """
        if self._protected.any():
            raise PageAccountingError(
                f"cannot clear the cache: {self._protected.sum()} pages are leased"
            )
        pages = self.pages()
        self._is_cached[:] = False
        self._reset()
        self._version += 1
        if self._sink is not None:
            self._sink(CacheCleared())
        return pages

    def pages(self) -> np.ndarray:
        """All cached pages, int32, ascending."""
        return np.flatnonzero(self._is_cached).astype(np.int32)

    def evictable_per_owner(self, without: Match | None = None) -> np.ndarray:
        """Cached pages without a lease, int32[num_shards].

        Args:
          without: a fresh match whose pages do not count, as if it were leased.
        """
        evictable = self._cached - self._protected
        if without is None or without._node is None:
            return evictable
        for node in without._node.path():
            if not node.leases:
                is_end = node is without._node
                num_pages = without._inside if is_end else node.pages.size
                evictable -= self._spread(int(node.pages[0]), num_pages)
        return evictable

    def stats(self) -> PrefixStats:
        """Counts for whoever watches."""
        return PrefixStats(
            cached_pages=self._cached.copy(),
            protected_pages=self._protected.copy(),
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            evicted_pages=self._evicted_pages,
            declined_inserts=self._declined_inserts,
        )

    def _reset(self) -> None:
        self._tree = RadixTree(self.page_size)
        self._queue: EvictionQueue[Node] = EvictionQueue(self.num_shards, self._policy)
        self._cached = np.zeros(self.num_shards, np.int32)
        self._protected = np.zeros(self.num_shards, np.int32)

    def _use_path(self, walk: Walk, namespace: Namespace) -> Node:
        """Marks what a walk found as used; returns the node that ends there."""
        self._uses += 1
        node = walk.node
        if node is None:
            node = self._tree.root(namespace)
        elif walk.inside < node.pages.size:
            node = self._split(node, walk.inside)
        for above in node.path():
            above.last_used = self._uses
        return node

    def _extend(self, parent: Node, tokens: np.ndarray, pages: np.ndarray) -> Node:
        """Hangs new pages below a node."""
        base = parent.base if parent.parent else int(pages[0]) % self.num_shards
        child = Node(
            parent, parent.namespace, tokens.copy(), pages.copy(), base, self._uses
        )
        if self._sink is not None:
            root_hash = parent.namespace.digest
            before = parent.hashes[-1] if parent.hashes else root_hash()
            child.hashes = page_hashes(tokens, self.page_size, before)
        self._version += 1
        self._tree.attach(child)
        self._queue.discard(parent)
        self._is_cached[pages] = True
        self._cached += self._spread(int(pages[0]), pages.size)
        return child

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cuts an edge after some pages; returns the node that ends there."""
        self._version += 1
        upper = self._tree.split(node, num_pages)
        self._queue_if_evictable(node)
        return upper

    def _join(self, node: Node | None) -> None:
        """Merges a node with its only child where nobody could tell them apart.

        So a prompt that is inserted chunk by chunk stays one edge, and an edge that was
        split is whole again when the other branch or the lease between is gone.
        """
        if node is None or node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        # equal counts: no lease ends at the node, so none has to be moved
        if node.leases == child.leases and self._policy(node) == self._policy(child):
            self._version += 1
            self._tree.join(child)
            self._queue_if_evictable(child)

    def _trim(self, leaf: Node, num_pages: int) -> None:
        """Takes a leaf's last pages out of the tree."""
        self._version += 1
        end = self._tree.trim(leaf, num_pages)
        if end is not None:
            self._queue_if_evictable(end)
            if end is not leaf:
                self._join(end)

    def _protect(self, node: Node, above: Node | None) -> None:
        """Counts one lease on a node and all up to `above`, which has it already."""
        gained = []
        for step in node.path():
            if step is above:
                break
            if not step.leases:
                gained.append(step)
            step.leases += 1
        if gained:
            self._protected += self._owners_of(gained)
            self._queue.discard(gained[0])

    def _queue_if_evictable(self, node: Node) -> None:
        if not node.leases and not node.children:
            self._queue.push(node)

    def _owners_of(self, nodes: list[Node]) -> np.ndarray:
        """Pages of some consecutive nodes by owner; the lowest node comes first."""
        num_pages = sum(node.pages.size for node in nodes)
        return self._spread(int(nodes[-1].pages[0]), num_pages)

    def _spread(self, first_page: int, num_pages: int) -> np.ndarray:
        """How many pages of a cyclic run each owner has, int32[num_shards]."""
        rounding = self._rounding[first_page % self.num_shards]
        return (num_pages + rounding) // self.num_shards

    def _check_lease(self, lease: Lease) -> None:
        if lease._cache is not self:
            raise ValueError("the lease belongs to another cache")
        if lease.is_released:
            raise PageAccountingError(f"the lease was released before: {lease}")

    def _check_adoptable(
        self, pages: np.ndarray, known: np.ndarray, num_leased: int
    ) -> None:
        """Refuses pages that are not the caller's to give."""
        elsewhere = self._is_cached[pages]
        elsewhere[: known.size] &= pages[: known.size] != known
        if elsewhere.any():
            raise PageAccountingError(
                f"page {pages[elsewhere][0]} is cached in another place of the tree"
            )
        ordered = np.sort(pages[num_leased:])
        repeated = ordered[1:] == ordered[:-1]
        if repeated.any():
            raise ValueError(
                f"page {ordered[1:][repeated][0]} is given twice to insert"
            )

    def _stored_event(self, above: Node, child: Node) -> PagesStored | None:
        """The event of new pages, made before they may join the edge above."""
        if self._sink is None:
            return None
        return PagesStored(
            page_hashes=tuple(child.hashes),
            parent_hash=above.hashes[-1] if above.hashes else None,
            token_ids=tuple(child.tokens.tolist()),
            page_size=self.page_size,
            namespace=child.namespace,
        )


def _check_namespace(namespace: Namespace) -> None:
    if not isinstance(namespace, Namespace):
        raise TypeError(f"{namespace=} must be a Namespace")
