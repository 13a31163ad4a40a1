import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import TinyDecoder

import jaxkv
from jaxkv import testing
from jaxkv.device.pool import copy_pages, create_pool, from_logical, to_logical
from jaxkv.device.regions import ShardGroup


def _make_pool(num_shards=4, head_axis=None, **axes):
    mesh = testing.simulated_mesh(kv=num_shards, **axes)
    group = ShardGroup(mesh, "kv", head_axis)
    return create_pool(TinyDecoder().spec(pages_per_shard=5), group)


def test_pages_lie_with_their_owner():
    pool = _make_pool()
    assert pool.k.shape == (3, 20, 4, 2, 8)
    for shard in pool.k.addressable_shards:
        start = shard.index[1].start
        assert shard.data.shape[1] == 5
        assert start == shard.device.id * 5


def test_heads_split_over_their_axis():
    pool = _make_pool(head_axis="heads", heads=2)
    assert {shard.data.shape for shard in pool.v.addressable_shards} == {
        (3, 5, 4, 1, 8)
    }


def test_logical_view_is_the_placement_both_ways():
    num_shards, pages_per_shard = 4, 5
    stored = jnp.arange(num_shards * pages_per_shard).reshape(1, -1)
    logical = to_logical(stored, num_shards)
    for page in range(num_shards * pages_per_shard):
        owner, physical = page % num_shards, page // num_shards
        assert logical[0, page] == owner * pages_per_shard + physical
    np.testing.assert_array_equal(from_logical(logical, num_shards), stored)


def test_copy_pages_moves_whole_pages_of_every_layer_and_nothing_else():
    pool = _make_pool(num_shards=2)
    values = np.random.default_rng(0).normal(size=pool.k.shape).astype(np.float32)
    pool = dataclasses.replace(
        pool,
        k=jax.device_put(values, pool.k.sharding),
        v=jax.device_put(values + 1, pool.v.sharding),
    )
    src = jnp.array([[1, 0], [2, 3]])
    dst = jnp.array([[4, 5], [1, 4]])  # 5 is past the end: padding
    copied = jax.jit(copy_pages, donate_argnums=0)(pool, src, dst)
    want = values.copy()
    want[:, 4] = values[:, 1]
    want[:, 5 + 1] = values[:, 5 + 2]
    want[:, 5 + 4] = values[:, 5 + 3]
    np.testing.assert_array_equal(copied.k, want)
    np.testing.assert_array_equal(copied.v, want + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_write_rows_drops_padding_and_copies_nothing(dtype):
    mesh = testing.simulated_mesh(kv=2)
    group = ShardGroup(mesh, "kv")
    spec = TinyDecoder().spec(pages_per_shard=300, dtype=dtype)
    pool = create_pool(spec, group)
    end = 300 * 4
    rows = jnp.array([[5, end, 4 * 299], [end + 7, 8, end]])
    staged = jnp.arange(3 * 6 * 2 * 8, dtype=dtype).reshape(3, 6, 2, 8) + 1
    plan = jaxkv.StepPlan(*[jnp.zeros(1)] * 14, write_rows=rows)
    write = jax.jit(jaxkv.write_rows, donate_argnums=0)
    compiled = write.lower(pool, staged, staged, plan).compile()
    testing.assert_pool_aliased(compiled, pool)
    assert compiled.memory_analysis().temp_size_in_bytes < spec.pool_bytes() / 8
    written = write(pool, staged, staged, plan)
    flat = np.asarray(written.k, np.float32).reshape(3, 2 * end, 2, 8)
    want = np.zeros_like(flat)
    for shard, index, row in [(0, 0, 5), (0, 2, 4 * 299), (1, 1, 8)]:
        want[:, shard * end + row] = np.asarray(staged, np.float32)[
            :, shard * 3 + index
        ]
    np.testing.assert_array_equal(flat, want)


def test_what_cannot_be_is_refused():
    spec = TinyDecoder().spec()
    mesh = testing.simulated_mesh(kv=2, heads=4)
    with pytest.raises(ValueError, match="axis 'ring' is not in the mesh"):
        create_pool(spec, ShardGroup(mesh, "ring"))
    with pytest.raises(ValueError, match=r"size 4 does not divide num_kv_heads=2"):
        create_pool(spec, ShardGroup(mesh, "kv", "heads"))
    with pytest.raises(ValueError, match="must differ from axis"):
        create_pool(spec, ShardGroup(mesh, "kv", "kv"))
