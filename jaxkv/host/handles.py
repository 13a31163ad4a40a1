"""What the prefix cache hands out: matches, leases, insertions, counts.

Made by `PrefixCache`; callers read the public fields and hand the values back.
"""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.host.radix_tree import Node

if TYPE_CHECKING:
    from jaxkv.host.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """The longest cached prefix of a prompt. Made by `PrefixCache.match`.

    Attributes:
      pages: its logical pages in position order, int32[num_pages].
      num_tokens: tokens that those pages hold.
      num_asked: tokens of the prompt.
    """

    pages: np.ndarray
    num_tokens: int
    num_asked: int
    _node: Node | None = dataclasses.field(repr=False)
    _inside: int = dataclasses.field(repr=False)  # matched pages of the node's edge
    _cache: "PrefixCache" = dataclasses.field(repr=False)
    _version: int = dataclasses.field(repr=False)

    @property
    def num_pages(self) -> int:
        """Pages of the prefix."""
        return self.pages.size


@dataclasses.dataclass(eq=False)
class Lease:
    """A hold on a chain's first pages, until released. Made by `PrefixCache.lease`.

    Attributes:
      num_pages: leased pages, from the chain's first; 0 is legal.
      is_released: whether it was given back.
    """

    num_pages: int
    _node: Node | None = dataclasses.field(repr=False)
    _cache: "PrefixCache" = dataclasses.field(repr=False)
    is_released: bool = False


class Insertion(NamedTuple):
    """What became of inserted pages.

    The caller points its chain at `pages`, and then frees `surplus`: the pages whose
    hold it has left over, because the tree has other pages with the same tokens, or the
    same page already (from a fork).
    """

    pages: np.ndarray  # int32[num_pages] the chain to use from now on
    adopted: np.ndarray  # int32[..] the caller's pages whose hold the tree took over
    surplus: np.ndarray  # int32[..] the caller's pages whose hold it has to drop
    declined: bool  # another rotation base: nothing changed, the caller keeps all


class PrefixStats(NamedTuple):
    """Counts since the cache was made, and its pages now."""

    cached_pages: np.ndarray  # int32[num_shards]
    protected_pages: np.ndarray  # int32[num_shards] those under a lease
    asked_tokens: int  # of prompts that were leased
    hit_tokens: int  # of those, tokens found in the cache
    evicted_pages: int
    declined_inserts: int
