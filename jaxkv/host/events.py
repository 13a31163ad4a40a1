"""What enters and leaves the prefix cache, told to whoever listens (a router).

A page's hash names its tokens, all tokens before them, and the namespace:

    namespace --sha256--> root                         (no page: parent_hash None)
    root | tokens of page 0 --sha256--> hash 0 | tokens of page 1 --sha256--> hash 1

Tokens are hashed as little-endian int32, so a hash is the same in every process, on
every platform and under every Python version. The events carry what vLLM's KV events
carry (BlockStored, BlockRemoved, AllBlocksCleared), a page being what it calls a block.
"""

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from jaxkv.host.namespace import Namespace

DEVICE = "device"
"""The medium of the pages in the device pool."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagesStored:
    """A run of pages joined a chain of the cache.

    Attributes:
      page_hashes: one a page, in chain order; sha256, 32 bytes each.
      parent_hash: hash of the page before the run; None where the run starts a chain.
      token_ids: tokens of the run, `page_size` a page.
      page_size: tokens a page.
      namespace: what the run was computed under.
      medium: where the pages lie.
    """

    page_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    page_size: int
    namespace: Namespace
    medium: str = DEVICE


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagesRemoved:
    """Pages left the cache.

    Attributes:
      page_hashes: one a page, in the order in which they left.
      medium: where the pages lay.
    """

    page_hashes: tuple[bytes, ...]
    medium: str = DEVICE


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCleared:
    """All pages of every namespace left the cache.

    Attributes:
      medium: where the pages lay.
    """

    medium: str = DEVICE


type Event = PagesStored | PagesRemoved | CacheCleared

type EventSink = Callable[[Event], object]


def page_hashes(tokens: np.ndarray, page_size: int, parent: bytes) -> list[bytes]:
    """Hashes of consecutive whole pages.

    Args:
      tokens: token ids, int32[num_pages * page_size].
      page_size: tokens a page.
      parent: hash of the page before; `Namespace.digest()` for a chain's first page.

    Returns:
      One sha256 digest a page, 32 bytes each.

    Raises:
      ValueError: the tokens do not fill whole pages.

    >>> tokens = np.arange(8, dtype=np.int32)
    >>> first, second = page_hashes(tokens, 4, Namespace().digest())
    >>> second == page_hashes(tokens[4:], 4, first)[0]
    True
    """
    if tokens.size % page_size:
        raise ValueError(f"{tokens.size} tokens are no whole pages of {page_size=}")
    data = memoryview(tokens.astype("<i4").tobytes())
    page_bytes = 4 * page_size
    hashes = []
    for start in range(0, len(data), page_bytes):
        digest = hashlib.sha256(parent)
        digest.update(data[start : start + page_bytes])
        parent = digest.digest()
        hashes.append(parent)
    return hashes
