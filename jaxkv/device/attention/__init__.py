"""Attention over pages: one contract, several backends, and the merge of parts.

Every row reads one contiguous range of its sequence's keys:

    keys of sequence s, in local order     0 1 2 3 4 5 6 7 ...   (page_table[s])
    row with seq_ids = s reads                 [k_start    k_end)

Causality, chunk offsets, windows, ragged batches, padding and striping are all such
ranges. An empty range gives output 0 and log-sum-exp -inf, and merging such a part
changes nothing, whatever a backend or a masked slot holds.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxkv.device.attention.reference import reference_attention

__all__ = ["attend_pages", "get_backend", "merge_partials", "reference_attention"]

type Backend = Callable[..., tuple[jax.Array, jax.Array]]

_BACKENDS: dict[str, Backend] = {"reference": reference_attention}


def get_backend(name: str) -> Backend:
    """The backend of that name; "auto" picks the best that serves everything asked.

    Raises:
      ValueError: there is no such backend.
    """
    if name == "auto":
        return reference_attention
    if name not in _BACKENDS:
        raise ValueError(
            f"attention={name!r} is not one of {['auto', *sorted(_BACKENDS)]}"
        )
    return _BACKENDS[name]


def attend_pages(
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
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query row over one range of its sequence's paged keys.

    Args:
      q: queries.
      k_pages: key pages.
      v_pages: value pages.
      page_table: pages of each sequence in local key order; key j of sequence s is
        slot `j % page_size` of page `page_table[s, j // page_size]`.
      seq_ids: sequence of each row.
      k_start: first key that the row reads.
      k_end: one past the last key that the row reads.
      scale: factor on the scores.
      softcap: where given, scores become `softcap * tanh(score / softcap)`.
      backend: a name that `get_backend` knows.

    Returns:
      out f32[T, Hq, Dv] and the natural-log log-sum-exp of the scores f32[T, Hq]; 0
      and -inf where the range is empty.
    """
    out, lse = get_backend(backend)(
        q,
        k_pages,
        v_pages,
        page_table,
        seq_ids,
        k_start,
        k_end,
        scale=scale,
        softcap=softcap,
    )
    # a kernel is not to be trusted with a row that has no keys (cases A05)
    empty = (k_end <= k_start)[:, None]
    return jnp.where(empty[..., None], 0.0, out), jnp.where(empty, -jnp.inf, lse)


def merge_partials(
    parts: Sequence[tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint key ranges by log-sum-exp.

    Args:
      parts: (out f32[..., Dv], lse f32[...]) of each part; a part with lse -inf
        counts for nothing, whatever its out holds.

    Returns:
      out and lse of the union; 0 and -inf where every part is empty.
    """
    outs = jnp.stack([out for out, _ in parts])
    lses = jnp.stack([lse for _, lse in parts])
    weights, total = softmax_weights(lses)
    kept = jnp.where(weights[..., None] > 0, outs, 0.0)
    return (kept * weights[..., None]).sum(axis=0), total


def softmax_weights(lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights of parts stacked along axis 0, and their total log-sum-exp.

    Weights sum to 1, or are all 0 where every part is empty.
    """
    largest = lses.max(axis=0, keepdims=True)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    terms = jnp.exp(lses - largest)
    total = terms.sum(axis=0, keepdims=True)
    weights = terms / jnp.where(total > 0, total, 1.0)
    return weights, (jnp.log(total) + largest)[0]
