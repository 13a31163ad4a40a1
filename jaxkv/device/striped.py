"""Striped reads: queries travel, and partial results merge by log-sum-exp.

Every shard attends all the step's queries to the pages and new rows that it owns. No
scratch and no prefix traffic: a layer moves about `T * Hq * (D + Dv)` elements. All
functions are per shard: they run inside `over_shards`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.device import ranges
from jaxkv.device.assembly import attend_rows
from jaxkv.device.attention import attend_pages, merge_partials, softmax_weights
from jaxkv.device.options import AttentionOptions
from jaxkv.plan import StepPlan


def attend_striped(
    q: jax.Array,  # [T or T / N, Hq, D]
    staged_k: jax.Array,  # [M, Hk, D]
    staged_v: jax.Array,  # [M, Hk, Dv]
    pool_k: jax.Array,  # [L, P, page_size, Hk, D]
    pool_v: jax.Array,  # [L, P, page_size, Hk, Dv]
    plan: StepPlan,
    layer: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """Attends all queries to this shard's stripe; out f32 for this shard's own rows."""
    axis = options.axis
    shard = lax.axis_index(axis)
    sharded = plan.num_token_blocks > 1
    if sharded:
        q = lax.all_gather(q, axis, tiled=True)
    rows = ranges.visible_rows(
        plan,
        positions=plan.positions,
        seq_ids=plan.seq_ids,
        first_block=0,
        window=options.window,
    )
    num_layers, num_pages, page_size, *_ = pool_k.shape
    geometry = {"num_shards": lax.axis_size(axis), "page_size": page_size}
    flat_k, flat_v = (
        part.reshape(num_layers * num_pages, *part.shape[2:])
        for part in (pool_k, pool_v)
    )
    prefix = attend_pages(
        q,
        flat_k,
        flat_v,
        layer * num_pages + plan.page_table[0],
        rows.seq_ids,
        *ranges.local_prefix_range(plan, rows, shard, **geometry),
        scale=options.scale,
        softcap=options.softcap,
        backend=options.backend,
    )
    chunk_range = ranges.local_chunk_range(plan, rows, shard, **geometry)
    chunk = attend_rows(q, staged_k, staged_v, *chunk_range, options)
    return merge_over_shards(*merge_partials([prefix, chunk]), axis, scatter=sharded)


def merge_over_shards(
    out: jax.Array, lse: jax.Array, axis: str, *, scatter: bool
) -> jax.Array:
    """Merges every shard's partial attention.

    Args:
      out: this shard's partial output, f32[T, Hq, Dv].
      lse: its log-sum-exp, f32[T, Hq].
      axis: the mesh axis of the shard group.
      scatter: give each shard its own token block, [T / N, Hq, Dv], not all rows.
    """
    weights, _ = softmax_weights(lax.all_gather(lse, axis))
    weight = weights[lax.axis_index(axis)][..., None]
    # a shard without keys for a row may hold anything there (cases A05)
    share = jnp.where(weight > 0, out, 0.0) * weight
    if scatter:
        return lax.psum_scatter(share, axis, scatter_dimension=0, tiled=True)
    return lax.psum(share, axis)
