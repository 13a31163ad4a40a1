"""Which cached leaf goes next: replaceable policies, and a queue that obeys them.

    short of pages on owners 1 and 2 of N = 4        tail
    leaf A   owners 0 1 2 3 0 1 2                      2   gives 2 1, then stops at 0
    leaf B   owners 3 0                                0   gives nothing yet

One heap an owner holds the leaves whose last page is that owner's: pages leave a chain
from its end, so only tails of short owners help without evicting others' pages in vain
(free pages of a single owner serve no chain). Entries are never searched for: a leaf
that changes gets another ticket, and its old entry is dropped when it comes to the top.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

NOT_QUEUED = -1


class Leaf(Protocol):
    """What policies and the queue see of a tree's node.

    Attributes:
      pages: logical pages of the node's edge, int32[num_pages], owners cyclic.
      last_used: the count of uses of the whole cache at this node's last one.
      num_uses: requests that used the node, the one that computed it included.
      created: the count of uses of the whole cache when the node was made.
      ticket: the queue's own mark.
    """

    pages: np.ndarray
    last_used: int
    num_uses: int
    created: int
    ticket: int


type Policy = Callable[[Any], Any]
"""From a `Leaf` to a sortable priority; the lowest goes first."""


def lru(leaf: Leaf) -> int:
    """Least recently used first."""
    return leaf.last_used


def lfu(leaf: Leaf) -> tuple[int, int]:
    """Least often used first; the least recently used of equals."""
    return leaf.num_uses, leaf.last_used


def fifo(leaf: Leaf) -> int:
    """Oldest first, however often used."""
    return leaf.created


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "fifo": fifo}
"""The given policies by name."""


def reach(pages: np.ndarray, short: np.ndarray) -> int:
    """How many of a leaf's last pages to take.

    As long as they are short owners' pages; where the last one is not, then all up to
    the first that is, or all.

    Args:
      pages: logical pages of the leaf, int32[num_pages], owners cyclic.
      short: pages that each owner still needs, integers [num_shards], not all 0.

    >>> pages = np.array([8, 5, 6, 7, 12])  # owners 0 1 2 3 0 of 4
    >>> [reach(pages, np.array(s)) for s in ([1, 0, 0, 0], [3, 0, 3, 9], [0, 0, 1, 0])]
    [1, 3, 3]
    """
    num_shards = short.size
    # an owner's pages come at its distance from the end and every num_shards after it
    distance = (int(pages[-1]) - np.arange(num_shards)) % num_shards
    needed = int((distance + short * num_shards).min())
    if not needed:
        needed = int(distance[short > 0].min()) + 1
    return min(needed, pages.size)


class EvictionQueue[L: Leaf]:
    """The leaves that may be evicted, lowest priority first."""

    def __init__(self, num_shards: int, policy: Policy):
        self._policy = policy
        self._heaps: list[list[tuple[Any, int, L]]] = [[] for _ in range(num_shards)]
        self._num_queued = 0
        self._next_ticket = 0

    def __len__(self) -> int:
        """Leaves in the queue."""
        return self._num_queued

    def push(self, leaf: L) -> None:
        """Queues a leaf with its present priority and pages, in place of before."""
        self.discard(leaf)
        leaf.ticket = self._next_ticket
        self._next_ticket += 1
        self._num_queued += 1
        heap = self._heaps[int(leaf.pages[-1]) % len(self._heaps)]
        heapq.heappush(heap, (self._policy(leaf), leaf.ticket, leaf))
        # dropped entries must not pile up where nothing is ever evicted
        if len(heap) > 2 * self._num_queued + 64:
            heap[:] = [kept for kept in heap if kept[2].ticket == kept[1]]
            heapq.heapify(heap)

    def discard(self, leaf: L) -> None:
        """Takes a leaf out of the queue, if it is there."""
        if leaf.ticket != NOT_QUEUED:
            leaf.ticket = NOT_QUEUED
            self._num_queued -= 1

    def pop(self, owners: Iterable[int]) -> L | None:
        """Takes the next leaf: the lowest of those that end on one of `owners`.

        Where none does, the lowest of all, for what its last pages hide; None where the
        queue is empty.
        """
        entry = self._lowest(owners) or self._lowest(range(len(self._heaps)))
        if entry is None:
            return None
        self.discard(entry[2])
        return entry[2]

    def _lowest(self, indices: Iterable[int]) -> tuple[Any, int, L] | None:
        best = None
        for index in indices:
            heap = self._heaps[index]
            while heap and heap[0][2].ticket != heap[0][1]:
                heapq.heappop(heap)
            if heap and (best is None or heap[0][:2] < best[:2]):
                best = heap[0]
        return best
