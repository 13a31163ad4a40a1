"""The reference backend: pure XLA, memory-bounded, runs everywhere.

Rows are grouped into tiles of one sequence each, and every tile runs an online softmax
over blocks of pages:

    rows      s0 s0 s0 s0 s0 | s1 | s2 s2        order of seq_ids, any input order
    tiles    [s0 s0 s0 s0][s0 . . .][s1 . . .][s2 s2 . .]
    keys     block 0, block 1, ... of the tile's own pages, until the longest k_end

No array is larger than tiles x keys of one block: there is no [T, S] score matrix.
"""

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
    num_rows, num_heads, _ = q.shape
    page_size, num_kv_heads, value_dim = v_pages.shape[1:]
    group = num_heads // num_kv_heads
    rows, tile_seq = _tiles(seq_ids, page_table.shape[0])
    # a padding slot of a tile reads row num_rows: a query of zeros, an empty range
    queries = jnp.take(q, rows, axis=0, mode="fill", fill_value=0)
    queries = queries.astype(jnp.float32) * scale
    queries = queries.reshape(*rows.shape, num_kv_heads, group, -1)
    per_score = (rows.shape[0], 1, 1, rows.shape[1], 1)
    starts = jnp.take(k_start, rows, mode="fill", fill_value=0).reshape(per_score)
    ends = jnp.take(k_end, rows, mode="fill", fill_value=0).reshape(per_score)

    pages_per_block = min(max(1, _KEYS_PER_BLOCK // page_size), page_table.shape[1])
    spare = -page_table.shape[1] % pages_per_block
    table = jnp.pad(page_table, ((0, 0), (0, spare)))[tile_seq]
    keys_per_block = pages_per_block * page_size

    def attend_block(block, state):
        largest, total, acc = state
        pages = lax.dynamic_slice_in_dim(
            table, block * pages_per_block, pages_per_block, axis=1
        )
        k, v = (
            part[pages]
            .reshape(pages.shape[0], keys_per_block, num_kv_heads, -1)
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

    head_rows = (rows.shape[0], num_kv_heads, group, rows.shape[1])
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
    flat = rows.reshape(-1)
    out = out.transpose(0, 3, 1, 2, 4).reshape(-1, num_heads, value_dim)
    lse = lse.transpose(0, 3, 1, 2).reshape(-1, num_heads)
    return (
        jnp.zeros((num_rows, num_heads, value_dim)).at[flat].set(out, mode="drop"),
        jnp.full((num_rows, num_heads), -jnp.inf).at[flat].set(lse, mode="drop"),
    )


def _tiles(seq_ids: jax.Array, num_sequences: int) -> tuple[jax.Array, jax.Array]:
    """Rows i32[tiles, rows_per_tile] (T for padding) and sequence i32[tiles]."""
    num_rows = seq_ids.shape[0]
    # one row a tile where sequences are as many as rows (decode): no padded rows
    rows_per_tile = min(_ROWS_PER_TILE, max(1, num_rows // num_sequences))
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
    tile_seq = jnp.repeat(
        jnp.arange(num_sequences, dtype=jnp.int32),
        tiles,
        total_repeat_length=num_tiles,
    )
    return rows.reshape(num_tiles, rows_per_tile), tile_seq
