"""What a cache stores, as frozen values that are validated once, on the host.

Sizes derive from a spec and the number of shards; nothing is stored twice. All sizes
are in bytes a device unless they say otherwise.
"""

import dataclasses
from typing import Any

import ml_dtypes  # noqa: F401  its import teaches numpy the name "bfloat16"
import numpy as np

MAX_ROWS = 2**31 - 2**26
"""Rows of one shard's pool, all layers: int32, less room for a step's padding rows."""


def _require_sizes(owner: object, smallest: int, *names: str) -> None:
    """Checks int fields of a frozen dataclass, and makes Python ints of them.

    numpy's would overflow in the products that sizes are made of.
    """
    for name in names:
        size = getattr(owner, name)
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"{name}={size!r} must be an int")
        if size < smallest:
            raise ValueError(f"{name}={size} must be at least {smallest}")
        object.__setattr__(owner, name, int(size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQA:
    """Keys and values of grouped-query attention (MHA and MQA are special cases).

    Attributes:
      num_kv_heads: KV heads of a layer, before any head sharding.
      head_dim: elements of a key head.
      v_head_dim: elements of a value head; `head_dim` where None.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    def __post_init__(self):
        _require_sizes(self, 1, "num_kv_heads", "head_dim")
        if self.v_head_dim is not None:
            _require_sizes(self, 1, "v_head_dim")

    @property
    def value_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def elements_per_token(self) -> int:
        """Elements that one token stores in one layer, all heads."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The shape of one cache: layers, what a token stores, pages, element type.

    Attributes:
      num_layers: layers that this cache holds.
      kv: what a token stores in a layer.
      page_size: tokens a page.
      pages_per_shard: pages each shard stores, the reserved page included.
      dtype: element type of the pool.
      first_layer: the model's index of the cache's first layer, so that a pipeline
        stage holds the range `first_layer .. first_layer + num_layers - 1`.
    """

    num_layers: int
    kv: GQA
    page_size: int
    pages_per_shard: int
    dtype: Any = "bfloat16"
    first_layer: int = 0

    def __post_init__(self):
        _require_sizes(self, 1, "num_layers", "page_size", "pages_per_shard")
        _require_sizes(self, 0, "first_layer")
        if not isinstance(self.kv, GQA):
            raise TypeError(f"kv={self.kv!r} must be a jaxkv.GQA")
        if self.pages_per_shard < 2:
            raise ValueError(
                f"pages_per_shard={self.pages_per_shard} must be at least 2: "
                "physical page 0 is reserved"
            )
        rows = self.num_layers * self.pages_per_shard * self.page_size
        if rows > MAX_ROWS:
            raise ValueError(
                f"{rows=} a shard (num_layers * pages_per_shard * page_size) must be "
                f"at most {MAX_ROWS}: rows are addressed by int32"
            )
        object.__setattr__(self, "dtype", _float_dtype(self.dtype))

    @property
    def layers(self) -> range:
        """The model's layer indices that this cache holds."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def usable_pages(self) -> int:
        """Pages a shard can give to chains."""
        return self.pages_per_shard - 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers and heads."""
        return self.num_layers * self.kv.elements_per_token * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers and heads."""
        return self.page_size * self.bytes_per_token

    def pool_bytes(self, head_shards: int = 1) -> int:
        """Bytes of one device's pool, its heads split `head_shards` ways."""
        return self.pages_per_shard * self.page_bytes // head_shards

    def scratch_bytes(
        self, max_prefix_tokens: int, chunk_tokens: int, head_shards: int = 1
    ) -> int:
        """Bytes of the two scratch slots of an assembled step, on one device.

        A slot is one layer's `[prefix | chunk | trash page]`; two live at a time
        because the gather runs one layer ahead.

        >>> spec = CacheSpec(num_layers=2, kv=GQA(num_kv_heads=4, head_dim=8),
        ...                  page_size=16, pages_per_shard=9, dtype="bfloat16")
        >>> spec.scratch_bytes(max_prefix_tokens=128, chunk_tokens=32)
        45056
        """
        rows = max_prefix_tokens + chunk_tokens + self.page_size
        row_bytes = self.kv.elements_per_token * self.dtype.itemsize // head_shards
        return 2 * rows * row_bytes

    def pages_for(
        self,
        memory_budget: int,
        *,
        max_prefix_tokens: int = 0,
        chunk_tokens: int = 0,
        head_shards: int = 1,
    ) -> int:
        """Pages a shard that fit into a budget; the scratch is charged first.

        Args:
          memory_budget: bytes that one device may spend on pool and scratch.
          max_prefix_tokens: the longest assembled prefix; 0 if all steps are striped.
          chunk_tokens: tokens of the largest step.
          head_shards: devices over which the KV heads are split.

        Returns:
          A value for `pages_per_shard` (`dataclasses.replace` puts it in a spec).

        Raises:
          ValueError: not even two pages are left (one is reserved), or an argument
            cannot be.

        >>> spec = CacheSpec(num_layers=2, kv=GQA(num_kv_heads=4, head_dim=8),
        ...                  page_size=16, pages_per_shard=2, dtype="bfloat16")
        >>> spec.page_bytes, spec.pages_for(100_000, max_prefix_tokens=128)
        (4096, 15)
        """
        if max_prefix_tokens < 0 or chunk_tokens < 0:
            raise ValueError(
                f"{max_prefix_tokens=} and {chunk_tokens=} must be at least 0"
            )
        if head_shards < 1 or self.kv.num_kv_heads % head_shards:
            raise ValueError(
                f"{head_shards=} does not divide num_kv_heads={self.kv.num_kv_heads}"
            )
        scratch = 0
        if max_prefix_tokens or chunk_tokens:
            scratch = self.scratch_bytes(max_prefix_tokens, chunk_tokens, head_shards)
        pages = int(memory_budget - scratch) * head_shards // self.page_bytes
        pages = min(pages, MAX_ROWS // (self.num_layers * self.page_size))
        if pages < 2:
            raise ValueError(
                f"{memory_budget=} bytes leaves {max(pages, 0)} pages after {scratch} "
                f"bytes of scratch; at least 2 pages of {self.page_bytes} bytes are "
                "needed"
            )
        return pages


def _float_dtype(dtype: Any) -> np.dtype:
    resolved = np.dtype(dtype)
    if resolved.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"dtype={resolved.name} is not one of float32, bfloat16, float16"
        )
    return resolved
