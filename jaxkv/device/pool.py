"""The persistent KV of all layers, one array each for keys and values.

    k, v   [num_layers, num_shards * pages_per_shard, page_size, num_kv_heads, dim]
                        ^ ordered by owner, split over `axis`   ^ split over `head_axis`

A step reads the pool and never writes it; its new rows enter in one donated
`write_rows` after the last layer. Kernels and gathers index flat pages
(`layer * pages + page` of the view [num_layers * pages, ...], which is free), because
`pool[layer]` as an operand copies a layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxkv.device.packing import Plan, unpack_plan
from jaxkv.device.regions import ShardGroup, over_shards
from jaxkv.spec import CacheSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool:
    """One cache's KV on its shard group; a pytree of two arrays.

    Attributes:
      k: keys, [L, N * P, page_size, Hk, D] in the spec's dtype.
      v: values, [L, N * P, page_size, Hk, Dv].
      spec: what the pool stores; static.
      group: where it stores it; static.
    """

    k: jax.Array  # dtype[L, N * P, page_size, Hk, D]
    v: jax.Array  # dtype[L, N * P, page_size, Hk, Dv]
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    group: ShardGroup = dataclasses.field(metadata={"static": True})

    @property
    def partition_spec(self) -> PartitionSpec:
        """How `k` and `v` are split: a pytree prefix for a caller's shard_map."""
        return PartitionSpec(None, self.group.axis, None, self.group.head_axis, None)


def create_pool(spec: CacheSpec, group: ShardGroup) -> KVPool:
    """A pool of zeros, made on its devices.

    Raises:
      ValueError: the mesh lacks an axis, or the head axis does not divide the heads.
    """
    for name in sorted(group.axes):
        if name not in group.mesh.axis_names:
            raise ValueError(
                f"axis {name!r} is not in the mesh {group.mesh.axis_names}"
            )
    if len(group.axes) == 1 and group.head_axis is not None:
        raise ValueError(
            f"head_axis={group.head_axis!r} must differ from axis={group.axis!r}"
        )
    if spec.kv.num_kv_heads % group.head_shards:
        raise ValueError(
            f"head_axis={group.head_axis!r} of size {group.head_shards} does not "
            f"divide num_kv_heads={spec.kv.num_kv_heads}"
        )
    shape = (
        spec.num_layers,
        group.num_shards * spec.pages_per_shard,
        spec.page_size,
        spec.kv.num_kv_heads,
    )
    sharding = group.sharding(None, group.axis, None, group.head_axis, None)
    k = jnp.zeros((*shape, spec.kv.head_dim), spec.dtype, device=sharding)
    v = jnp.zeros((*shape, spec.kv.value_dim), spec.dtype, device=sharding)
    return KVPool(k, v, spec, group)


def write_rows(pool: KVPool, k: jax.Array, v: jax.Array, plan: Plan) -> KVPool:
    """Writes a step's staged rows; donate the pool to the jitted caller.

    The only write that a step makes: on the flat row view, so that XLA updates the
    donated pool in place.

    Args:
      pool: the pool that the step read.
      k: staged keys, [L, N * M, Hk, D], each shard's rows together.
      v: staged values, [L, N * M, Hk, Dv].
      plan: the step's plan.
    """
    group = pool.group
    plan = unpack_plan(plan, group)
    staged = PartitionSpec(None, group.axis, group.head_axis, None)

    def write(pool_k, pool_v, k, v, rows):
        return _write_flat(pool_k, k, rows[0]), _write_flat(pool_v, v, rows[0])

    k, v = over_shards(
        write,
        group,
        (
            pool.partition_spec,
            pool.partition_spec,
            staged,
            staged,
            PartitionSpec(group.axis),
        ),
        (pool.partition_spec, pool.partition_spec),
    )(pool.k, pool.v, k, v, plan.write_rows)
    return dataclasses.replace(pool, k=k, v=v)


def copy_pages(pool: KVPool, src_pages: jax.Array, dst_pages: jax.Array) -> KVPool:
    """Copies whole pages within each shard; donate the pool to the jitted caller.

    Args:
      pool: the pool.
      src_pages: physical pages to read, i32[N, C]; padded with the reserved page.
      dst_pages: physical pages to write, i32[N, C]; out of bounds for padding.
    """
    group = pool.group
    pages = PartitionSpec(group.axis)

    def copy(pool_k, pool_v, src, dst):
        return _copy_flat(pool_k, src[0], dst[0]), _copy_flat(pool_v, src[0], dst[0])

    k, v = over_shards(
        copy,
        group,
        (pool.partition_spec, pool.partition_spec, pages, pages),
        (pool.partition_spec, pool.partition_spec),
    )(pool.k, pool.v, src_pages, dst_pages)
    return dataclasses.replace(pool, k=k, v=v)


def to_logical(stored: jax.Array, num_shards: int) -> jax.Array:
    """The stored page order as logical page order.

    Args:
      stored: [L, N * P, ...], pages by owner, then physical page.
      num_shards: N.

    Returns:
      [L, P * N, ...]: page `l` of the result is logical page `l`.
    """
    num_layers, num_pages, *rest = stored.shape
    split = stored.reshape(num_layers, num_shards, num_pages // num_shards, *rest)
    return split.swapaxes(1, 2).reshape(stored.shape)


def from_logical(pages: jax.Array, num_shards: int) -> jax.Array:
    """The inverse of `to_logical`."""
    num_layers, num_pages, *rest = pages.shape
    split = pages.reshape(num_layers, num_pages // num_shards, num_shards, *rest)
    return split.swapaxes(1, 2).reshape(pages.shape)


def _write_flat(pool: jax.Array, staged: jax.Array, rows: jax.Array) -> jax.Array:
    """Scatters [L, M, H, D] into one shard's [L, P, page_size, H, D] at rows i32[M]."""
    _, num_pages, page_size, *rest = pool.shape
    return _scatter_layers(pool, staged, rows, (num_pages * page_size, *rest))


def _copy_flat(pool: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """Copies pages i32[C] of every layer within one shard's pool."""
    num_layers, num_pages, *rest = pool.shape
    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    flat = pool.reshape(num_layers * num_pages, *rest)
    pages = flat.at[layer * num_pages + src[None]].get(mode="clip")
    return _scatter_layers(pool, pages, dst, (num_pages, *rest))


def _scatter_layers(
    pool: jax.Array, update: jax.Array, index: jax.Array, layer_shape: tuple[int, ...]
) -> jax.Array:
    """Sets `index` i32[M] of every layer, viewed as `layer_shape`, to [L, M, ...].

    An index at or past the layer's end is padding and is dropped.
    """
    num_layers, num_updates = update.shape[:2]
    size, *rest = layer_shape
    index = index[None]
    total = num_layers * size
    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    # padding goes past the end of the whole pool, not of its own layer, and no two to
    # the same place: unique indices let XLA scatter without ordering
    padding = total + jnp.arange(num_layers * num_updates, dtype=jnp.int32)
    flat_index = jnp.where(
        index < size, layer * size + index, padding.reshape(num_layers, num_updates)
    )
    flat = pool.reshape(total, *rest)
    flat = flat.at[flat_index.reshape(-1)].set(
        update.reshape(-1, *rest), mode="drop", unique_indices=True
    )
    return flat.reshape(pool.shape)
