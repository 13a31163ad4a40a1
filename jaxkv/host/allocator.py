"""Pages by owner: one free list a shard, drawn cyclically.

    num_shards = 4, a chain of 6 pages from owner 3

    class 0   class 1   class 2   class 3        one free list (class) an owner
      |2        |3        |4        |1           order of the draws
      |6        |         |         |5

A draw pops each class's most recently freed page, so nothing is stranded; lack of
room is None and changes nothing; an inconsistent free raises and changes nothing.
"""

from collections.abc import Sequence

import numpy as np

from jaxkv import placement
from jaxkv.errors import PageAccountingError


class PageAllocator:
    """Free lists and holds of the logical pages of one shard group.

    Attributes:
      num_shards: shards of the group.
      pages_per_shard: physical pages a shard, the reserved page included.
    """

    def __init__(self, num_shards: int, pages_per_shard: int):
        """Starts with every page but the reserved ones free.

        Raises:
          ValueError: there is no shard, or no usable page a shard.
        """
        if num_shards < 1:
            raise ValueError(f"{num_shards=} must be at least 1")
        if pages_per_shard < 2:
            raise ValueError(
                f"{pages_per_shard=} must be at least 2: physical page 0 is reserved"
            )
        self.num_shards = num_shards
        self.pages_per_shard = pages_per_shard
        # stacks[o, :num_free[o]] are the free pages of owner o, the next to draw last
        descending = np.arange(pages_per_shard - 1, 0, -1, dtype=np.int32)
        self._stacks = placement.logical(
            np.arange(num_shards, dtype=np.int32)[:, None], descending, num_shards
        )
        self._num_free = np.full(num_shards, pages_per_shard - 1, np.int32)
        self._holds = np.zeros(num_shards * pages_per_shard, np.int32)
        self._num_shared = 0  # pages with more than one hold

    @property
    def usable_pages(self) -> int:
        """Pages of the whole group that chains may hold."""
        return self.num_shards * (self.pages_per_shard - 1)

    def free_per_owner(self) -> np.ndarray:
        """Free pages of each owner, int32[num_shards] (a copy)."""
        return self._num_free.copy()

    def available_pages(self) -> int:
        """Pages that any chain can still draw: `num_shards` times the shortest class.

        The only number that admission may use: free pages of one owner beyond it
        cannot serve a cyclic chain.
        """
        return self.num_shards * int(self._num_free.min())

    def best_root(self) -> int:
        """The owner a new chain starts on: most free pages, ties to the lowest."""
        return int(self._num_free.argmax())

    def holds(self, pages: np.ndarray) -> np.ndarray:
        """How many holders each page has, int32 like `pages`; 0 for a free page."""
        return self._holds[self._checked(pages)]

    def shared_pages(self) -> np.ndarray:
        """Pages with more than one holder, int32, ascending."""
        if not self._num_shared:
            return np.zeros(0, np.int32)
        return np.flatnonzero(self._holds > 1).astype(np.int32)

    def allocate(
        self, num_pages: int, first_owner: int | None = None
    ) -> np.ndarray | None:
        """Draws pages for the next stretch of a chain.

        Args:
          num_pages: pages to draw, on owners `first_owner`, `first_owner + 1`, ...
          first_owner: owner of the first page; `best_root()` where None.

        Returns:
          Logical pages int32[num_pages], each held once; None where a class is short,
          and then nothing has changed.

        Raises:
          ValueError: `num_pages` is negative or `first_owner` is no shard.
        """
        drawn = self.allocate_batch([(num_pages, first_owner)])
        return None if drawn is None else drawn[0]

    def allocate_batch(
        self, draws: Sequence[tuple[int, int | None]]
    ) -> list[np.ndarray] | None:
        """Makes several draws (`allocate`'s arguments), in order, all or none."""
        for num_pages, first_owner in draws:
            if num_pages < 0:
                raise ValueError(f"{num_pages=} must be at least 0")
            if first_owner is not None and not 0 <= first_owner < self.num_shards:
                raise ValueError(
                    f"{first_owner=} is not a shard of 0..{self.num_shards - 1}"
                )
        shards = np.arange(self.num_shards)
        num_free = self._num_free.copy()
        drawn = []
        for num_pages, first_owner in draws:
            root = int(num_free.argmax()) if first_owner is None else first_owner
            counts = placement.pages_per_owner(num_pages, root, shards, self.num_shards)
            if (counts > num_free).any():
                return None
            pages = np.empty(num_pages, np.int32)
            for step in range(min(num_pages, self.num_shards)):
                shard = (root + step) % self.num_shards
                top = num_free[shard]
                taken = self._stacks[shard, top - counts[shard] : top]
                pages[step :: self.num_shards] = taken[::-1]
            num_free -= counts
            drawn.append(pages)
        self._num_free = num_free
        for pages in drawn:
            self._holds[pages] = 1
        return drawn

    def share(self, pages: np.ndarray) -> None:
        """Adds one holder to each of some allocated pages.

        Raises:
          ValueError: an id is out of range, reserved or given twice.
          PageAccountingError: a page is not allocated.
        """
        pages = self._allocated(pages, "share")
        self._num_shared += int((self._holds[pages] == 1).sum())
        self._holds[pages] += 1

    def free(self, pages: np.ndarray) -> None:
        """Drops one hold of each page; one without holders is free, and first reused.

        Raises:
          ValueError: an id is out of range, reserved or given twice.
          PageAccountingError: a page is not allocated (freed twice, or another's).
        """
        pages = self._allocated(pages, "free")
        self._num_shared -= int((self._holds[pages] == 2).sum())
        self._holds[pages] -= 1
        released = pages[self._holds[pages] == 0]
        owners = placement.owner(released, self.num_shards)
        for shard in range(self.num_shards):
            returned = released[owners == shard]
            top = self._num_free[shard]
            self._stacks[shard, top : top + returned.size] = returned
            self._num_free[shard] += returned.size

    def _checked(self, pages: np.ndarray) -> np.ndarray:
        pages = np.asarray(pages)
        if pages.size and not np.issubdtype(pages.dtype, np.integer):
            raise ValueError(f"page ids must be integers, got {pages.dtype}")
        outside = (pages < self.num_shards) | (pages >= self._holds.size)
        if outside.any():
            raise ValueError(
                f"page {pages[outside].flat[0]} is not a usable page of "
                f"{self.num_shards}..{self._holds.size - 1} (lower ids are reserved)"
            )
        return pages.astype(np.int32)

    def _allocated(self, pages: np.ndarray, verb: str) -> np.ndarray:
        pages = self._checked(pages)
        ordered = np.sort(pages)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.size:
            raise ValueError(f"page {repeated[0]} is given twice to {verb}")
        idle = self._holds[pages] == 0
        if idle.any():
            raise PageAccountingError(
                f"cannot {verb} page {pages[idle][0]}: it is not allocated"
            )
        return pages
