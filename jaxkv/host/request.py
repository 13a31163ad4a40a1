"""Requests, and the table that keeps their state in arrays.

A request is a handle on one slot (one row of each array), so that the planner reads a
whole batch at once with numpy:

    slot   num_tokens  num_computed  base  num_pages   stripes[shard, slot, :]
     0        37           30          3      2         [[.], [.], [], [..]]
     1         5            5          0      1         physical pages by owner

A chain's page P is entry `P // N` of its owner's stripe, so a table whose owners are
not cyclic cannot be written down at all; `extend_chain` checks what it is given.
"""

from collections.abc import Iterable

import numpy as np

from jaxkv import placement
from jaxkv.errors import ClosedRequestError
from jaxkv.host.handles import Lease
from jaxkv.host.namespace import DEFAULT_NAMESPACE, Namespace


class Request:
    """One sequence being served. Made by `KVCache.open`, read-only for callers.

    Attributes:
      id: a number no other request of the cache has.
      slot: its row in the request table; -1 once closed.
      namespace: where the prefix cache keeps its pages.
      lease: its hold on cached pages; None while it is preempted.
      epoch: grows whenever it loses its pages; a step of an older one is not its.
      is_declined: its chain has another rotation base than the cached one it would
        join, so that its pages stay its own.
    """

    def __init__(
        self,
        id: int,
        slot: int,
        table: "RequestTable",
        tokens: np.ndarray,
        namespace: Namespace,
    ):
        self.id = id
        self.slot = slot
        self.namespace = namespace
        self.lease: Lease | None = None
        self.epoch = 0
        self.is_declined = False
        self._table = table
        self._tokens = tokens

    def __repr__(self) -> str:
        if self.is_closed:
            return f"Request(id={self.id}, closed)"
        return (
            f"Request(id={self.id}, num_tokens={self.num_tokens}, "
            f"num_computed={self.num_computed}, num_pages={self.num_pages})"
        )

    @property
    def is_closed(self) -> bool:
        """Whether the request was closed or aborted."""
        return self.slot < 0

    @property
    def is_preempted(self) -> bool:
        """Whether its pages were dropped; `KVCache.resume` brings it back."""
        return not self.is_closed and self.lease is None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, computed or not."""
        return int(self._table.num_tokens[self._open_slot()])

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in the pool."""
        return int(self._table.num_computed[self._open_slot()])

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next steps have to compute."""
        return self.num_tokens - self.num_computed

    @property
    def num_pages(self) -> int:
        """Pages of its chain."""
        return int(self._table.num_pages[self._open_slot()])

    @property
    def base(self) -> int:
        """Rotation base: the owner of page 0; -1 while the chain is empty."""
        return int(self._table.base[self._open_slot()])

    @property
    def tokens(self) -> np.ndarray:
        """Its token ids, int32[num_tokens] (a read-only view)."""
        view = self._tokens[: self.num_tokens]
        view.flags.writeable = False
        return view

    def pages(self) -> np.ndarray:
        """Logical pages of its chain in position order, int32[num_pages]."""
        return self._table.chain(self._open_slot())

    def _open_slot(self) -> int:
        if self.slot < 0:
            raise ClosedRequestError(f"request {self.id} is closed")
        return self.slot


class RequestTable:
    """The open requests' state, one array entry a slot; grows as needed."""

    def __init__(self, num_shards: int, page_size: int):
        self.num_shards = num_shards
        self.page_size = page_size
        self.num_tokens = np.zeros(0, np.int32)
        self.num_computed = np.zeros(0, np.int32)
        self.num_pages = np.zeros(0, np.int32)
        self.base = np.zeros(0, np.int32)
        self.next_token = np.zeros(0, np.int32)
        self.stripes = np.zeros((num_shards, 0, 1), np.int32)
        self.requests: dict[int, Request] = {}
        self._free_slots: list[int] = []
        self._next_id = 0

    def open(
        self, tokens: np.ndarray, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> Request:
        """A request over int32 tokens, with an empty chain."""
        if not self._free_slots:
            self._grow_slots()
        slot = self._free_slots.pop()
        buffer = np.zeros(max(16, 2 * tokens.size), np.int32)
        buffer[: tokens.size] = tokens
        self.num_tokens[slot] = tokens.size
        self.base[slot] = -1
        self.next_token[slot] = tokens[0] if tokens.size else 0
        request = Request(self._next_id, slot, self, buffer, namespace)
        self._next_id += 1
        self.requests[request.id] = request
        return request

    def close(self, request: Request) -> None:
        """Ends a request; its pages are the caller's to free first."""
        slot = request._open_slot()
        self.drop_chain(request)
        self.num_tokens[slot] = 0
        request.slot = -1
        del self.requests[request.id]
        self._free_slots.append(slot)

    def drop_chain(self, request: Request) -> None:
        """Empties a request's chain: all its tokens are to be computed again."""
        slot = request._open_slot()
        self.num_computed[slot] = self.num_pages[slot] = 0
        self.base[slot] = -1
        self.next_token[slot] = request._tokens[0]
        self.stripes[:, slot] = placement.RESERVED_PAGE

    def append(self, request: Request, tokens: np.ndarray) -> None:
        """Adds int32 tokens at a request's end."""
        slot = request._open_slot()
        start = int(self.num_tokens[slot])
        end = start + tokens.size
        if end > request._tokens.size:
            spare = 2 * end - request._tokens.size
            request._tokens = np.pad(request._tokens, (0, spare))
        request._tokens[start:end] = tokens
        self.num_tokens[slot] = end
        if self.num_computed[slot] == start and tokens.size:
            self.next_token[slot] = tokens[0]

    def advance(self, requests: Iterable[Request], counts: np.ndarray) -> None:
        """Marks each request's next `counts` tokens as computed."""
        requests = tuple(requests)
        if len(requests) != counts.size:
            raise ValueError(f"{len(requests)} requests, but {counts.size} counts")
        for request, count in zip(requests, counts.tolist(), strict=True):
            computed = self.num_computed[request.slot] + count
            self.num_computed[request.slot] = computed
            if computed < self.num_tokens[request.slot]:
                self.next_token[request.slot] = request._tokens[computed]

    def extend_chain(self, request: Request, pages: np.ndarray) -> None:
        """Adds logical pages at a chain's end.

        Raises:
          ValueError: a page is reserved, or the owners would not be cyclic along the
            chain; unchanged then.
        """
        slot = request._open_slot()
        if not pages.size:
            return
        if pages.min() < self.num_shards:
            raise ValueError(
                f"page {pages.min()} is reserved: pages start at {self.num_shards}"
            )
        start = int(self.num_pages[slot])
        base = int(self.base[slot]) if start else int(pages[0]) % self.num_shards
        index = np.arange(start, start + pages.size)
        owners = placement.chain_owner(index, base, self.num_shards)
        wrong = placement.owner(pages, self.num_shards) != owners
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"page {pages[first]} cannot be page {index[first]} of a chain of "
                f"{base=}: its owner is {pages[first] % self.num_shards}, not "
                f"{owners[first]}"
            )
        depth = (start + pages.size - 1) // self.num_shards + 1
        if depth > self.stripes.shape[2]:
            extra = max(depth, 2 * self.stripes.shape[2]) - self.stripes.shape[2]
            self.stripes = np.pad(self.stripes, ((0, 0), (0, 0), (0, extra)))
        local = index // self.num_shards
        self.stripes[owners, slot, local] = placement.physical(pages, self.num_shards)
        self.base[slot] = base
        self.num_pages[slot] = start + pages.size

    def repoint_chain(self, request: Request, pages: np.ndarray) -> None:
        """Puts other logical pages, of the same owners, in place of a chain's first.

        Raises:
          ValueError: an owner differs, or the chain is shorter; unchanged then.
        """
        slot = request._open_slot()
        old = self.chain(slot)
        if (
            pages.size > old.size
            or ((pages - old[: pages.size]) % self.num_shards).any()
        ):
            raise ValueError(
                f"a chain of {self.num_pages[slot]} pages {old} cannot be re-pointed "
                f"at {pages}"
            )
        owners = placement.owner(pages, self.num_shards)
        local = np.arange(pages.size) // self.num_shards
        self.stripes[owners, slot, local] = placement.physical(pages, self.num_shards)

    def chain(self, slot: int, num_pages: int | None = None) -> np.ndarray:
        """Logical pages of a chain (its first `num_pages`) in position order, int32."""
        if num_pages is None:
            num_pages = int(self.num_pages[slot])
        index = np.arange(num_pages)
        owners = placement.chain_owner(index, int(self.base[slot]), self.num_shards)
        stored = self.stripes[owners, slot, index // self.num_shards]
        return placement.logical(owners, stored, self.num_shards).astype(np.int32)

    def pages_needed(self, num_tokens: np.ndarray) -> np.ndarray:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def _grow_slots(self) -> None:
        old = self.num_tokens.size
        extra = max(8, old)
        for name in ("num_tokens", "num_computed", "num_pages", "base", "next_token"):
            setattr(self, name, np.pad(getattr(self, name), (0, extra)))
        self.stripes = np.pad(self.stripes, ((0, 0), (0, extra), (0, 0)))
        self._free_slots = list(range(old + extra - 1, old - 1, -1))
