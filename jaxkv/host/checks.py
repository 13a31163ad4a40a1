"""What callers hand in, checked before anything changes."""

from collections.abc import Sequence

import numpy as np

type Ids = Sequence[int] | np.ndarray


def checked_ids(values: Ids, name: str) -> np.ndarray:
    """Integers in one axis, as int32.

    Raises:
      TypeError: they are not integers.
      ValueError: there is another number of axes, or one does not fit into int32.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} have shape {array.shape}, expected one axis")
    if array.dtype == np.int32:
        return array
    if not array.size:
        return np.zeros(0, np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    limits = np.iinfo(np.int32)
    outside = (array < limits.min) | (array > limits.max)
    if outside.any():
        raise ValueError(f"{name} must be int32, got {array[outside][0]}")
    return array.astype(np.int32)


def check_chain(pages: np.ndarray, num_shards: int, num_pages: int) -> None:
    """Refuses int32 pages that no chain can consist of.

    Args:
      pages: logical pages in position order, int32[..].
      num_shards: shards of the group.
      num_pages: logical pages of the group, the reserved ones included.

    Raises:
      ValueError: an id is reserved or out of range, or the owners are not cyclic.
    """
    outside = (pages < num_shards) | (pages >= num_pages)
    if outside.any():
        raise ValueError(
            f"page {pages[outside][0]} is not a usable page of "
            f"{num_shards}..{num_pages - 1} (lower ids are reserved)"
        )
    if not pages.size:
        return
    expected = pages[0] + np.arange(pages.size, dtype=np.int32)
    wrong = (pages - expected) % num_shards != 0
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"page {pages[index]} cannot be page {index} of a chain that starts on "
            f"page {pages[0]}: its owner is {pages[index] % num_shards}, not "
            f"{expected[index] % num_shards}"
        )
