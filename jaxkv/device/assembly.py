"""Assembled reads: keys travel, one layer (or round) ahead of the attention.

    shard 0 sends its pages, padded to the block     scratch, owner-major
    shard 1 ...                                      [ 0 0 0 | 1 1 1 | ... | N-1 ]
                                      all_gather      ^ block pages an owner

A step whose prefixes exceed the scratch takes several rounds a layer, each a whole
number of rotations of every chain. Functions here are per shard: they run inside
`over_shards`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.device import ranges
from jaxkv.device.attention import attend_pages, merge_partials
from jaxkv.device.options import AttentionOptions
from jaxkv.plan import StepPlan

_CHUNK_PAGE = 64


class PrefixPages(NamedTuple):
    """One round's gathered prefix pages of one layer (a scratch slot's prefix)."""

    k: jax.Array  # dtype[N * B, page_size, Hk, D]
    v: jax.Array  # dtype[N * B, page_size, Hk, Dv]


def gather_prefix(
    pool_k: jax.Array,
    pool_v: jax.Array,
    send_pages: jax.Array,
    layer: jax.Array,
    axis: str,
) -> PrefixPages:
    """Gathers one layer's prefix pages from every shard.

    Args:
      pool_k: this shard's keys, [L, P, page_size, Hk, D].
      pool_v: this shard's values, [L, P, page_size, Hk, Dv].
      send_pages: physical pages that this shard sends, i32[B].
      layer: index of the layer in the pool, i32[].
      axis: the mesh axis of the shard group.
    """
    parts = []
    for part in (pool_k, pool_v):
        num_layers, num_pages, *rest = part.shape
        flat = part.reshape(num_layers * num_pages, *rest)
        block = flat.at[layer * num_pages + send_pages].get(mode="clip")
        parts.append(lax.all_gather(block, axis, tiled=True))
    return PrefixPages(*parts)


def attend_assembled(
    q: jax.Array,  # [T or T / N, Hq, D]
    k: jax.Array,  # [T or T / N, Hk, D]
    v: jax.Array,  # [T or T / N, Hk, Dv]
    gathered: PrefixPages | None,
    pool_k: jax.Array,
    pool_v: jax.Array,
    plan: StepPlan,
    layer: jax.Array,
    options: AttentionOptions,
) -> tuple[jax.Array, PrefixPages | None]:
    """Attends this shard's queries to the whole prefix and chunk.

    Starts the gather of the next round, or of the next layer's first, before each
    attention call and needs it only after: the barriers pin both ends around the call,
    which the scheduler left alone does not.

    Returns:
      out f32 like q with value heads, and the next layer's first round.
    """
    axis = options.axis
    shard = lax.axis_index(axis)
    first_block = shard if plan.num_token_blocks > 1 else 0
    rows = ranges.visible_rows(
        plan,
        positions=ranges.own_rows(plan.positions, plan, axis),
        seq_ids=ranges.own_rows(plan.seq_ids, plan, axis),
        first_block=first_block,
        window=options.window,
    )
    parts = []
    last_layer = pool_k.shape[0] - 1
    for number in range(plan.num_rounds):
        if gathered is None:
            break  # no sequence has a prefix yet
        if number + 1 < plan.num_rounds:
            send, send_layer = plan.send_pages[0, number + 1], layer
        else:
            # the last layer gathers itself once more: 1/L of the traffic, hidden too
            send, send_layer = plan.send_pages[0, 0], jnp.minimum(layer + 1, last_layer)
        q, send = lax.optimization_barrier((q, send))
        following = gather_prefix(pool_k, pool_v, send, send_layer, axis)
        part = attend_pages(
            q,
            gathered.k,
            gathered.v,
            plan.page_table[number],
            rows.seq_ids,
            *ranges.round_prefix_range(plan, rows, number),
            scale=options.scale,
            softcap=options.softcap,
            backend=options.backend,
        )
        part, gathered = lax.optimization_barrier((part, following))
        parts.append(part)
    if plan.num_token_blocks > 1:
        k, v = (
            lax.all_gather(part, axis, tiled=True)[plan.chunk_rows] for part in (k, v)
        )
    chunk_range = ranges.request_chunk_range(plan, rows)
    parts.append(attend_rows(q, k, v, *chunk_range, options))
    return merge_partials(parts)[0], gathered


def attend_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Attention to ranges of rows [K, Hk, D], paged as one sequence."""
    page_size = min(_CHUNK_PAGE, k.shape[0])
    spare = -k.shape[0] % page_size
    k, v = (
        jnp.pad(part, ((0, spare), (0, 0), (0, 0))).reshape(
            -1, page_size, *part.shape[1:]
        )
        for part in (k, v)
    )
    return attend_pages(
        q,
        k,
        v,
        jnp.arange(k.shape[0], dtype=jnp.int32)[None],
        jnp.zeros(q.shape[0], jnp.int32),
        k_start,
        k_end,
        scale=options.scale,
        softcap=options.softcap,
        backend=options.backend,
    )
