import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.device.attention import attend_pages, get_backend, merge_partials
from jaxkv.testing import dense_attention


def _make_case(rng, *, rows_per_seq, page_size, heads, kv_heads, dim, value_dim):
    """Random rows over random pages; every slot that no row may read is NaN."""
    num_sequences = len(rows_per_seq)
    num_rows = sum(rows_per_seq)
    width = 4
    num_pages = num_sequences * width + 2
    k = rng.normal(size=(num_pages, page_size, kv_heads, dim)).astype(np.float32)
    v = rng.normal(size=(num_pages, page_size, kv_heads, value_dim)).astype(np.float32)
    table = 2 + rng.permutation(num_sequences * width).reshape(num_sequences, width)
    seq_ids = rng.permutation(np.repeat(np.arange(num_sequences), rows_per_seq))
    ends = rng.integers(0, width * page_size + 1, num_rows)
    starts = np.minimum(rng.integers(0, width * page_size, num_rows), ends)
    q = rng.normal(size=(num_rows, heads, dim)).astype(np.float32)
    seen = np.zeros((num_pages, page_size), bool)
    for row in range(num_rows):
        for key in range(starts[row], ends[row]):
            seen[table[seq_ids[row], key // page_size], key % page_size] = True
    k[~seen], v[~seen] = np.nan, np.nan
    return q, k, v, table, seq_ids, starts, ends


def _expected(q, k, v, table, seq_ids, starts, ends, softcap=None):
    """A dense row at a time: the last of a sequence of just the keys that it reads."""
    num_rows, heads, _ = q.shape
    out = np.zeros((num_rows, heads, v.shape[-1]))
    lse = np.full((num_rows, heads), -np.inf)
    for row in range(num_rows):
        keys = k[table[seq_ids[row]]].reshape(-1, *k.shape[2:])[starts[row] : ends[row]]
        values = v[table[seq_ids[row]]].reshape(-1, *v.shape[2:])
        values = values[starts[row] : ends[row]]
        if not len(keys):
            continue
        group = heads // k.shape[2]
        scores = np.einsum("hd,khd->hk", q[row], np.repeat(keys, group, axis=1)) * 0.3
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        lse[row] = np.log(weights.sum(axis=1))
        weights /= weights.sum(axis=1, keepdims=True)
        out[row] = np.einsum("hk,khd->hd", weights, np.repeat(values, group, axis=1))
    return out, lse


@pytest.mark.parametrize("rows_per_seq", [[1, 1, 1], [40], [5, 0, 70], [9, 1, 1, 1]])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "page_size", "softcap"),
    [(9, 3, 8, 8, 4, None), (4, 4, 8, 16, 1, 5.0), (32, 8, 16, 8, 64, None)],
)
def test_reference_reads_exactly_its_ranges(
    rows_per_seq, heads, kv_heads, dim, value_dim, page_size, softcap
):
    case = _make_case(
        np.random.default_rng(0),
        rows_per_seq=rows_per_seq,
        page_size=page_size,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=value_dim,
    )
    out, lse = attend_pages(
        *(jnp.asarray(part) for part in case), scale=0.3, softcap=softcap
    )
    want_out, want_lse = _expected(*case, softcap=softcap)
    np.testing.assert_allclose(out, want_out, atol=5e-6)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)


def test_a_bad_value_reaches_the_rows_that_read_it_and_no_others():
    k = jnp.ones((1, 8, 1, 4))
    v = jnp.ones((1, 8, 1, 4)).at[0, 5].set(jnp.nan)
    starts, ends = jnp.array([0, 0, 6]), jnp.array([5, 6, 8])
    out, _ = attend_pages(
        jnp.ones((3, 1, 4)),
        k,
        v,
        jnp.zeros((1, 1), jnp.int32),
        jnp.zeros(3, jnp.int32),
        starts,
        ends,
        scale=1.0,
    )
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[2]).all()


def test_oracle_agrees_with_a_plain_softmax():
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(6, 2, 4)) for _ in range(3))
    out = dense_attention(q, k, v, window=3)
    scores = np.exp(q[5, 1] @ k[3:6, 1].T / 2)
    np.testing.assert_allclose(out[5, 1], scores / scores.sum() @ v[3:6, 1])


def test_a05_a_part_without_keys_has_no_weight(monkeypatch):
    from jaxkv.device import attention

    def untrustworthy(q, k_pages, v_pages, *ranges, scale, softcap):
        shape = (q.shape[0], q.shape[1])
        return jnp.full((*shape, 2), 7.0), jnp.full(shape, 0.3)

    monkeypatch.setitem(attention._BACKENDS, "untrustworthy", untrustworthy)
    empty = attend_pages(
        jnp.ones((1, 1, 2)),
        jnp.ones((1, 4, 1, 2)),
        jnp.ones((1, 4, 1, 2)),
        jnp.zeros((1, 1), jnp.int32),
        jnp.zeros(1, jnp.int32),
        jnp.array([4]),
        jnp.array([4]),
        scale=1.0,
        backend="untrustworthy",
    )
    true = jnp.array([[[1.0, 2.0]]]), jnp.array([[0.5]])
    out, lse = merge_partials([true, empty, empty])
    np.testing.assert_array_equal(out, [[[1.0, 2.0]]])
    np.testing.assert_array_equal(lse, [[0.5]])


def test_merge_ignores_whatever_an_empty_part_holds():
    out = jnp.array([[[1.0, 2.0]], [[jnp.nan, jnp.inf]]])
    lse = jnp.array([[0.5], [-jnp.inf]])
    junk = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf)
    merged, total = merge_partials([(out, lse), junk, junk])
    np.testing.assert_array_equal(merged, [[[1.0, 2.0]], [[0.0, 0.0]]])
    np.testing.assert_array_equal(total, [[0.5], [-np.inf]])


def test_merge_of_parts_is_the_whole():
    rng = np.random.default_rng(2)
    case = _make_case(
        rng,
        rows_per_seq=[7],
        page_size=4,
        heads=2,
        kv_heads=1,
        dim=4,
        value_dim=4,
    )
    q, k, v, table, seq_ids, starts, ends = (jnp.asarray(part) for part in case)
    middle = (starts + ends) // 2

    def attend(first, last):
        return attend_pages(q, k, v, table, seq_ids, first, last, scale=0.3)

    whole = attend(starts, ends)
    merged = merge_partials([attend(starts, middle), attend(middle, ends)])
    np.testing.assert_allclose(merged[0], whole[0], atol=2e-6)
    np.testing.assert_allclose(merged[1], whole[1], atol=2e-6)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="attention='flash' is not one of"):
        get_backend("flash")
