"""Where a token lives: arithmetic only, no table.

Logical page `l` is stored by shard `l % num_shards` as that shard's physical page
`l // num_shards`. A chain with rotation base `b` puts page `P` on shard
`(b + P) % num_shards`:

    num_shards = 4, base = 3      page of the chain   0  1  2  3  4  5
                                  owner               3  0  1  2  3  0
                                  index on the owner  0  0  0  0  1  1

Logical pages `0 .. num_shards - 1` (physical page 0 of each shard) are reserved as
trash pages: in-bounds targets for padding. Every function here takes Python ints,
numpy arrays or jax arrays alike and returns the same kind.
"""

from typing import Any

RESERVED_PAGE = 0
"""The physical page that no chain ever holds, on each shard."""

type Ints = Any  # int, numpy array or jax array of ints


def owner(logical_page: Ints, num_shards: int) -> Ints:
    """The shard that stores a logical page.

    >>> [owner(page, 4) for page in (4, 5, 6, 7, 8)]
    [0, 1, 2, 3, 0]
    """
    return logical_page % num_shards


def physical(logical_page: Ints, num_shards: int) -> Ints:
    """The index of a logical page in its owner's pool.

    >>> physical(9, 4)
    2
    """
    return logical_page // num_shards


def logical(owner: Ints, physical_page: Ints, num_shards: int) -> Ints:
    """The logical page that `owner` stores as `physical_page`.

    >>> logical(1, 2, 4)
    9
    """
    return physical_page * num_shards + owner


def chain_owner(page_index: Ints, base: Ints, num_shards: int) -> Ints:
    """The shard of a chain's page number `page_index`, for rotation base `base`.

    >>> [chain_owner(page_index, 3, 4) for page_index in range(6)]
    [3, 0, 1, 2, 3, 0]
    """
    return (base + page_index) % num_shards


def pages_per_owner(num_pages: Ints, base: Ints, shard: Ints, num_shards: int) -> Ints:
    """How many of a chain's first `num_pages` pages `shard` stores.

    >>> [pages_per_owner(6, 3, shard, 4) for shard in range(4)]
    [2, 1, 1, 2]
    """
    distance = (shard - base) % num_shards
    return (num_pages - distance + num_shards - 1) // num_shards


def tokens_per_owner(
    length: Ints, base: Ints, shard: Ints, *, num_shards: int, page_size: int
) -> Ints:
    """How many of a sequence's first `length` tokens `shard` stores.

    One formula serves prefix counts, causal limits (`k_end` of the query at position
    `p` is the count for `p + 1`) and window limits (`k_start` is the count for
    `p + 1 - window`), because a shard keeps its tokens in position order.

    >>> [tokens_per_owner(17, 3, s, num_shards=4, page_size=4) for s in range(4)]
    [4, 4, 4, 5]
    """
    rotation = num_shards * page_size
    distance = (shard - base) % num_shards
    rest = length % rotation - distance * page_size
    # clip(rest, 0, page_size), spelled so that int, numpy and jax all take it
    rest = rest * (rest > 0)
    rest = rest - (rest - page_size) * (rest > page_size)
    return length // rotation * page_size + rest


def location(logical_page: Ints, offset: Ints, page_size: int) -> Ints:
    """The loc (shard-independent token slot) of an offset in a logical page.

    >>> location(9, 3, 16)
    147
    """
    return logical_page * page_size + offset


def pool_row(loc: Ints, *, num_shards: int, page_size: int) -> Ints:
    """The row of a loc in its owner's pool.

    >>> pool_row(147, num_shards=4, page_size=16)
    35
    """
    return loc // page_size // num_shards * page_size + loc % page_size


def gather_ranges(
    prefix_len: int, workspace: int, *, num_shards: int, page_size: int
) -> list[tuple[int, int]]:
    """Token ranges in which a prefix is gathered through a smaller workspace.

    Every range but the last is a whole number of rotations, so that each starts on
    the chain's base again (cases A04: a chunk that starts inside a rotation comes back
    in the wrong order).

    Args:
      prefix_len: tokens of the prefix.
      workspace: tokens that one gather may assemble.
      num_shards: shards of the group.
      page_size: tokens a page.

    Raises:
      ValueError: the workspace is smaller than one rotation.

    >>> gather_ranges(70, 40, num_shards=4, page_size=4)
    [(0, 32), (32, 64), (64, 70)]
    """
    rotation = num_shards * page_size
    if workspace < rotation:
        raise ValueError(
            f"{workspace=} tokens is less than one rotation of {rotation} tokens "
            f"({num_shards=} x {page_size=})"
        )
    step = workspace // rotation * rotation
    return [
        (start, min(start + step, prefix_len)) for start in range(0, prefix_len, step)
    ]
