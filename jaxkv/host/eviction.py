"""Which cached leaf goes next: replaceable policies, and a queue that obeys them.

    queue of N = 4 shards    |0|1|2|3|all|     one heap an owner, one for long leaves
    leaf of pages on 2, 3        x x           queued for each owner it has pages of
    leaf of >= N pages               x         helps every owner: queued once

Entries are never searched for: a leaf that is used again, grows or goes away gets
another ticket, and its old entries are dropped when they come to the top.
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


class EvictionQueue[L: Leaf]:
    """The leaves that may be evicted, lowest priority first."""

    def __init__(self, num_shards: int, policy: Policy):
        self._num_shards = num_shards
        self._policy = policy
        self._heaps: list[list[tuple[Any, int, L]]] = [
            [] for _ in range(num_shards + 1)
        ]
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
        entry = (self._policy(leaf), leaf.ticket, leaf)
        if leaf.pages.size >= self._num_shards:
            heaps = [self._heaps[-1]]
        else:
            owners = (leaf.pages % self._num_shards).tolist()
            heaps = [self._heaps[owner] for owner in owners]
        for heap in heaps:
            heapq.heappush(heap, entry)
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
        """Takes the next leaf: the lowest that has pages of one of `owners`.

        Where no leaf has, the lowest of all, because what it hides may; None where the
        queue is empty.
        """
        entry = self._lowest([*owners, self._num_shards])
        if entry is None:
            entry = self._lowest(range(self._num_shards))
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
