"""A planned step as the host remembers it: what was planned, and against what state."""

import dataclasses
from typing import Any

import numpy as np

from jaxkv import placement
from jaxkv.host.buckets import StepShape
from jaxkv.host.request import Request
from jaxkv.plan import StepPlan


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step between plan and commit. Read-only; made by `KVCache.plan`.

    Attributes:
      plan: what the jitted step takes: the plan packed into one array on the devices.
      arrays: the same plan's fields on the host, numpy.
      requests: the batch, in the order of the plan's sequences.
      counts: new tokens of each request, int32[len(requests)].
      epochs: each request's epoch when it was planned.
      shape: the plan's static sizes.
      version: the cache's version that it was planned against.
      scratch: where the scratch of an assembled step of one round holds each loc; None
        for other steps.
    """

    plan: Any
    arrays: StepPlan
    requests: tuple[Request, ...]
    counts: np.ndarray
    epochs: tuple[int, ...]
    shape: StepShape
    version: int
    scratch: "ScratchMap | None"

    @property
    def mode(self) -> str:
        """How the step reads prefixes: "assembled" or "striped"."""
        return "striped" if self.shape.num_rounds == 0 else "assembled"

    def translate(self, locs: np.ndarray) -> np.ndarray:
        """Scratch rows of any vector of locs; see `ScratchMap.translate`.

        Raises:
          ValueError: the step has no scratch (striped) or several (rounds).
        """
        if self.scratch is None:
            raise ValueError(
                f"the {self.mode} step of {self.shape.num_rounds} rounds has no single "
                "scratch to translate to"
            )
        return self.scratch.translate(locs)


@dataclasses.dataclass(frozen=True, eq=False)
class ScratchMap:
    """Where an assembled step's scratch holds each loc.

        [ prefix: N * block pages, owner-major | chunk: T rows, request order | trash ]

    Attributes:
      num_shards: shards of the group.
      page_size: tokens a page.
      block: pages an owner sends.
      num_tokens: rows of the chunk region.
      prefix_pages: logical pages of the prefix in owner-major order.
      prefix_slots: slots of each that hold prefix tokens.
      chunk_locs: loc of each chunk row, in request order.
    """

    num_shards: int
    page_size: int
    block: int
    num_tokens: int
    prefix_pages: np.ndarray
    prefix_slots: np.ndarray
    chunk_locs: np.ndarray

    @property
    def chunk_start(self) -> int:
        """First row of the chunk region."""
        return self.num_shards * self.block * self.page_size

    @property
    def trash_start(self) -> int:
        """First row of the trash page."""
        return self.chunk_start + self.num_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the whole scratch."""
        return self.trash_start + self.page_size

    def translate(self, locs: np.ndarray) -> np.ndarray:
        """Rows of the scratch that hold some locs.

        Args:
          locs: token slots, ints of any shape; none may be negative.

        Returns:
          int32 rows like `locs`; a loc that the step neither reads nor writes (an
          unwritten slot, another request's page, a reserved page) maps to the trash
          page.

        Raises:
          TypeError, ValueError: a loc is not an integer, or negative.
        """
        locs = np.asarray(locs)
        if locs.size and not np.issubdtype(locs.dtype, np.integer):
            raise TypeError(f"locs must be integers, got {locs.dtype}")
        if locs.size and locs.min() < 0:
            raise ValueError(f"loc {locs.min()} must be at least 0")
        locs = locs.astype(np.int64)
        page, offset = locs // self.page_size, locs % self.page_size
        rows = self.trash_start + offset
        owners = placement.owner(self.prefix_pages, self.num_shards)
        counts = np.bincount(owners, minlength=self.num_shards)
        first = np.cumsum(counts) - counts
        scratch_page = (
            owners * self.block + np.arange(self.prefix_pages.size) - first[owners]
        )
        index, found = _find(self.prefix_pages, page)
        if self.prefix_pages.size:
            found &= offset < self.prefix_slots[index]
            prefix_rows = scratch_page[index] * self.page_size + offset
            rows = np.where(found, prefix_rows, rows)
        index, found = _find(self.chunk_locs, locs)
        return np.where(found, self.chunk_start + index, rows).astype(np.int32)


def _find(values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of each wanted value in distinct `values`, and whether it is there."""
    if not values.size:
        return np.zeros(wanted.shape, np.int64), np.zeros(wanted.shape, bool)
    order = np.argsort(values)
    place = np.minimum(np.searchsorted(values[order], wanted), values.size - 1)
    index = order[place]
    return index, values[index] == wanted
