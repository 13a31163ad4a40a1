"""The key ranges of a step's rows, as arithmetic on positions.

A row at position `p` of a sequence sees tokens `[max(0, p + 1 - window), p + 1)`. The
prefix part reads those below `prefix_len` from the pool or the scratch, the chunk part
the others from the step's own rows. `tokens_per_owner` turns token bounds into bounds
of one shard's local key order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv import placement
from jaxkv.plan import StepPlan


class Rows(NamedTuple):
    """What a shard must know of the query rows that it attends."""

    seq_ids: jax.Array  # i32[T]
    start: jax.Array  # i32[T], first token position that the row sees
    end: jax.Array  # i32[T], one past the last; equal to start for a padding row


def own_rows(values: jax.Array, plan: StepPlan, axis: str) -> jax.Array:
    """This shard's part of i32[T]: all of it where tokens are replicated."""
    if plan.num_token_blocks == 1:
        return values
    size = values.shape[0] // plan.num_token_blocks
    return lax.dynamic_slice_in_dim(values, lax.axis_index(axis) * size, size)


def visible_rows(
    plan: StepPlan,
    *,
    positions: jax.Array,
    seq_ids: jax.Array,
    first_block: jax.Array | int,
    window: int | None,
) -> Rows:
    """The tokens that each of some rows sees.

    Args:
      plan: the step's plan.
      positions: i32[rows], whole token blocks of the plan.
      seq_ids: i32[rows].
      first_block: the token block of the first row.
      window: tokens that a row sees, itself included; None for all before it.
    """
    rows_per_block = plan.stage_rows.shape[1]
    if plan.num_token_blocks == 1:
        rows_per_block = positions.shape[0]
    num_blocks = positions.shape[0] // rows_per_block
    counts = lax.dynamic_slice_in_dim(plan.num_rows, first_block, num_blocks)
    within = jnp.tile(jnp.arange(rows_per_block, dtype=jnp.int32), num_blocks)
    real = within < jnp.repeat(counts, rows_per_block)
    end = jnp.where(real, positions + 1, 0)
    start = jnp.zeros_like(end) if window is None else jnp.maximum(end - window, 0)
    return Rows(seq_ids, start, end)


def local_prefix_range(
    plan: StepPlan, rows: Rows, shard: jax.Array, *, num_shards: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Each row's range of its sequence's prefix keys on one shard, i32[T] twice."""
    prefix = plan.prefix_lens[rows.seq_ids]

    def count(tokens: jax.Array) -> jax.Array:
        return placement.tokens_per_owner(
            jnp.minimum(tokens, prefix),
            plan.bases[rows.seq_ids],
            shard,
            num_shards=num_shards,
            page_size=page_size,
        )

    return count(rows.start), count(rows.end)


def local_chunk_range(
    plan: StepPlan, rows: Rows, shard: jax.Array, *, num_shards: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Each row's range of one shard's staged rows, i32[T] twice."""
    prefix = plan.prefix_lens[rows.seq_ids]

    def count(tokens: jax.Array) -> jax.Array:
        return placement.tokens_per_owner(
            tokens,
            plan.bases[rows.seq_ids],
            shard,
            num_shards=num_shards,
            page_size=page_size,
        )

    before = count(prefix)
    first = plan.stage_cu_lens[0, rows.seq_ids]
    start = first + count(jnp.maximum(rows.start, prefix)) - before
    end = first + count(jnp.maximum(rows.end, prefix)) - before
    return start, end


def round_prefix_range(
    plan: StepPlan, rows: Rows, number: int
) -> tuple[jax.Array, jax.Array]:
    """Each row's range of its prefix keys assembled by one gather round."""
    first, last = plan.round_starts[number], plan.round_starts[number + 1]
    prefix = plan.prefix_lens[rows.seq_ids]

    def count(tokens: jax.Array) -> jax.Array:
        return jnp.clip(jnp.minimum(tokens, prefix), first, last) - first

    return count(rows.start), count(rows.end)


def request_chunk_range(plan: StepPlan, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Each row's range of the step's own keys in request order."""
    prefix = plan.prefix_lens[rows.seq_ids]
    first = plan.cu_q_lens[rows.seq_ids] - prefix
    return first + jnp.maximum(rows.start, prefix), first + jnp.maximum(
        rows.end, prefix
    )
