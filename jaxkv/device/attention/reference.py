"""The reference backend: pure XLA, memory-bounded, runs everywhere.

Rows are grouped into tiles of one sequence each, and every tile runs an online softmax
over blocks of pages:

    rows      s0 s0 s0 s0 s0 | s1 | s2 s2        order of seq_ids, any input order
    tiles    [s0 s0 s0 s0][s0 . . .][s1 . . .][s2 s2 . .]
    keys     block 0, block 1, ... of the tile's own pages, until the longest k_end

No array is larger than tiles x keys of one block: there is no [T, S] score matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_KEYS_PER_BLOCK = 64
_ROWS_PER_TILE = 32


def reference_attention(
    q: jax.Array,  # [T, Hq, D]
    k_pages: jax.Array,  # [P, page_size, Hk, D]
    v_pages: jax.Array,  # [P, page_size, Hk, Dv]
    page_table: jax.Array,  # i32[S, W]
    seq_ids: jax.Array,  # i32[T]
    k_start: jax.Array,  # i32[T]
    k_end: jax.Array,  # i32[T]
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The contract of `attend_pages`, in float32."""
    _, num_heads, _ = q.shape
    page_size, num_kv_heads, value_dim = v_pages.shape[1:]
    group = num_heads // num_kv_heads
    tiles = _make_tiles(seq_ids, page_table.shape[0])
    queries = tiles.split(q).astype(jnp.float32) * scale
    num_tiles, rows_per_tile = queries.shape[:2]
    queries = queries.reshape(num_tiles, rows_per_tile, num_kv_heads, group, -1)
    # a padding slot of a tile has an empty range
    starts = tiles.split(k_start).reshape(num_tiles, 1, 1, rows_per_tile, 1)
    ends = tiles.split(k_end).reshape(num_tiles, 1, 1, rows_per_tile, 1)

    pages_per_block = min(max(1, _KEYS_PER_BLOCK // page_size), page_table.shape[1])
    spare = -page_table.shape[1] % pages_per_block
    table = jnp.pad(page_table, ((0, 0), (0, spare)))[tiles.seq_ids]
    keys_per_block = pages_per_block * page_size

    def attend_block(block, state):
        largest, total, acc = state
        pages = lax.dynamic_slice_in_dim(
            table, block * pages_per_block, pages_per_block, axis=1
        )
        k, v = (
            part[pages]
            .reshape(num_tiles, keys_per_block, num_kv_heads, -1)
            .astype(jnp.float32)
            for part in (k_pages, v_pages)
        )
        key = block * keys_per_block + jnp.arange(keys_per_block)
        key = key.reshape(1, 1, 1, 1, keys_per_block)
        seen = (key >= starts) & (key < ends)
        scores = jnp.einsum("nqhgd,nkhd->nhgqk", queries, k, precision="highest")
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        base = jnp.where(jnp.isneginf(new_largest), 0.0, new_largest)
        weights = jnp.exp(scores - base[..., None])
        decay = jnp.exp(largest - base)
        # 0 * NaN is NaN: a bad value must reach the rows that read it, and no others
        bad = ~jnp.isfinite(v).all(axis=-1)
        v = jnp.where(bad[..., None], 0.0, v)
        hit = (seen & bad.swapaxes(1, 2)[:, :, None, None]).any(axis=-1)
        added = jnp.einsum("nhgqk,nkhd->nhgqd", weights, v, precision="highest")
        added = jnp.where(hit[..., None], jnp.nan, added)
        return (
            new_largest,
            total * decay + weights.sum(axis=-1),
            acc * decay[..., None] + added,
        )

    head_rows = (num_tiles, num_kv_heads, group, rows_per_tile)
    longest = jnp.max(jnp.where(k_end > k_start, k_end, 0), initial=0)
    largest, total, acc = lax.fori_loop(
        0,
        jnp.minimum(-(-longest // keys_per_block), table.shape[1] // pages_per_block),
        attend_block,
        (
            jnp.full(head_rows, -jnp.inf),
            jnp.zeros(head_rows),
            jnp.zeros((*head_rows, value_dim)),
        ),
    )
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    lse = jnp.log(total) + jnp.where(jnp.isneginf(largest), 0.0, largest)
    out = out.transpose(0, 3, 1, 2, 4).reshape(-1, num_heads, value_dim)
    lse = lse.transpose(0, 3, 1, 2).reshape(-1, num_heads)
    return tiles.join(out), tiles.join(lse)


class _Tiles(NamedTuple):
    """Rows grouped into tiles of one sequence each."""

    seq_ids: jax.Array  # i32[tiles]
    rows_per_tile: int
    num_rows: int
    rows: jax.Array | None  # i32[tiles * rows_per_tile], num_rows for padding
    slots: jax.Array | None  # i32[num_rows], place of each row; None: in order

    def split(self, values: jax.Array) -> jax.Array:
        """[T, ...] as [tiles, rows_per_tile, ...], zeros in padding slots."""
        if self.rows is None:
            spare = self.seq_ids.shape[0] * self.rows_per_tile - self.num_rows
            values = jnp.pad(values, ((0, spare), *[(0, 0)] * (values.ndim - 1)))
        else:
            values = values.at[self.rows].get(mode="fill", fill_value=0)
        return values.reshape(-1, self.rows_per_tile, *values.shape[1:])

    def join(self, values: jax.Array) -> jax.Array:
        """[tiles * rows_per_tile, ...] as [T, ...]."""
        return values[: self.num_rows] if self.slots is None else values[self.slots]


def _make_tiles(seq_ids: jax.Array, num_sequences: int) -> _Tiles:
    num_rows = seq_ids.shape[0]
    rows_per_tile = min(_ROWS_PER_TILE, max(1, num_rows // num_sequences))
    if rows_per_tile == 1:
        return _Tiles(seq_ids, 1, num_rows, None, None)
    if num_sequences == 1:
        num_tiles = -(-num_rows // rows_per_tile)
        seq_ids = jnp.zeros(num_tiles, jnp.int32)
        return _Tiles(seq_ids, rows_per_tile, num_rows, None, None)
    num_tiles = min(num_rows, num_rows // rows_per_tile + num_sequences)
    order = jnp.argsort(seq_ids, stable=True).astype(jnp.int32)
    sorted_ids = seq_ids[order]
    lens = jnp.zeros(num_sequences, jnp.int32).at[seq_ids].add(1)
    tiles = -(-lens // rows_per_tile)
    first_tile = jnp.cumsum(tiles) - tiles
    first_row = jnp.cumsum(lens) - lens
    within = jnp.arange(num_rows, dtype=jnp.int32) - first_row[sorted_ids]
    slot = first_tile[sorted_ids] * rows_per_tile + within
    rows = jnp.full(num_tiles * rows_per_tile, num_rows, jnp.int32).at[slot].set(order)
    slots = jnp.zeros(num_rows, jnp.int32).at[order].set(slot)
    tile_seq = jnp.repeat(
        jnp.arange(num_sequences, dtype=jnp.int32), tiles, total_repeat_length=num_tiles
    )
    return _Tiles(tile_seq, rows_per_tile, num_rows, rows, slots)
