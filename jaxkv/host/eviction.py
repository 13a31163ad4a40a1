"""Which cached leaf goes next: replaceable policies, and a queue that obeys them.

Pages leave a chain from its end, and only pages of owners that are short help: free
pages of the other owners serve no chain. So what a leaf costs depends on its last page:

    short of owner 1 only, N = 4      owners of a leaf    pages to take
                                      ... 2 3 0 1         1
                                      ... 3 0 1 2         2, one of them in vain
                                      ... 1 2 3 0         4, three in vain

The policy's priority is like a time: the leaf whose age, counted from the newest, is
greatest for each page to take goes next; where all owners are short, the oldest. Age
alone would leave owners with free pages that nothing can use. Taking nothing in vain
would keep old leaves for ever, for ending on the wrong owner.

Entries are never searched for: a leaf that changes gets another ticket, and its old
entry is dropped when it comes to the top.
"""

import heapq
from collections.abc import Callable
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


type Policy = Callable[[Any], int]
"""From a `Leaf` to its priority, like a time; the lowest goes first."""


def lru(leaf: Leaf) -> int:
    """Least recently used first."""
    return leaf.last_used


def lfu(leaf: Leaf) -> int:
    """Least often used first, the least recently used of equals."""
    return (leaf.num_uses << 48) + leaf.last_used


def fifo(leaf: Leaf) -> int:
    """Oldest first, however often used."""
    return leaf.created


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "fifo": fifo}
"""The given policies by name."""


def take_costs(short: np.ndarray) -> list[int]:
    """Pages to take from a chain for one that helps, by the owner of its last page.

    >>> take_costs(np.array([0, 5, 0, 0]))
    [4, 1, 2, 3]
    """
    num_shards = short.size
    helps = (short > 0).tolist()
    costs = [0] * num_shards
    cost = num_shards
    for shard in range(-num_shards, num_shards):
        cost = 1 if helps[shard] else cost + 1
        costs[shard] = cost
    return costs


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
    return min(needed or int(distance[short > 0].min()) + 1, pages.size)


class EvictionQueue[L: Leaf]:
    """The leaves that may be evicted, in one heap for each owner of a last page."""

    def __init__(self, num_shards: int, policy: Policy):
        self._policy = policy
        self._heaps: list[list[tuple[int, int, L]]] = [[] for _ in range(num_shards)]
        self._num_queued = 0
        self._next_ticket = 0
        self._newest = 0

    def __len__(self) -> int:
        """Leaves in the queue."""
        return self._num_queued

    def push(self, leaf: L) -> None:
        """Queues a leaf with its present priority and pages, in place of before."""
        self.discard(leaf)
        priority = self._policy(leaf)
        self._newest = max(self._newest, priority)
        leaf.ticket = self._next_ticket
        self._next_ticket += 1
        self._num_queued += 1
        heap = self._heaps[int(leaf.pages[-1]) % len(self._heaps)]
        heapq.heappush(heap, (priority, leaf.ticket, leaf))
        # dropped entries must not pile up where nothing is ever evicted
        if len(heap) > 2 * self._num_queued + 64:
            heap[:] = [kept for kept in heap if kept[2].ticket == kept[1]]
            heapq.heapify(heap)

    def discard(self, leaf: L) -> None:
        """Takes a leaf out of the queue, if it is there."""
        if leaf.ticket != NOT_QUEUED:
            leaf.ticket = NOT_QUEUED
            self._num_queued -= 1

    def pop(self, short: np.ndarray) -> L | None:
        """Takes the leaf that goes next; None where the queue is empty.

        Args:
          short: pages that each owner still needs, integers [num_shards], not all 0.
        """
        best = None
        best_age = best_cost = 1
        costs = take_costs(short)
        for heap, cost in zip(self._heaps, costs, strict=True):
            while heap and heap[0][2].ticket != heap[0][1]:
                heapq.heappop(heap)
            if not heap:
                continue
            entry = heap[0]
            age = self._newest - entry[0] + 1
            lead = age * best_cost - best_age * cost
            if best is None or lead > 0 or (lead == 0 and entry[:2] < best[:2]):
                best, best_age, best_cost = entry, age, cost
        if best is None:
            return None
        self.discard(best[2])
        return best[2]
