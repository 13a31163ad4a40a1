import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import TinyDecoder

import jaxkv
from jaxkv import testing


def _make_step():
    return jax.jit(lambda x: x * 2 + 1)


def test_compilations_are_counted_inside_the_context_only():
    step = _make_step()
    with testing.count_compilations() as count:
        step(jnp.zeros(3)).block_until_ready()
        first = count.value
        step(jnp.ones(3)).block_until_ready()
        assert count.value == first > 0
    _make_step()(jnp.zeros(5)).block_until_ready()
    assert count.value == first


def test_a_compilation_fails_the_guard():
    with (
        pytest.raises(AssertionError, match="programs were compiled"),
        testing.no_compilation(),
    ):
        _make_step()(jnp.zeros(7)).block_until_ready()


def test_a_pool_that_is_not_donated_fails_the_guard():
    cache = jaxkv.KVCache(TinyDecoder().spec(), testing.simulated_mesh(kv=2))

    def step(pool):
        return jaxkv.KVPool(pool.k + 1, pool.v + 1, pool.spec, pool.group)

    kept = jax.jit(step).lower(cache.pool).compile()
    with pytest.raises(AssertionError, match="bytes a device are aliased"):
        testing.assert_pool_aliased(kept, cache.pool)
    donated = jax.jit(step, donate_argnums=0).lower(cache.pool).compile()
    testing.assert_pool_aliased(donated, cache.pool)


def test_poison_reaches_every_slot():
    cache = jaxkv.KVCache(TinyDecoder().spec(), testing.simulated_mesh(kv=2))
    testing.poison(cache)
    assert np.isnan(np.asarray(cache.pool.k)).all()
    assert np.isnan(np.asarray(cache.pool.v)).all()


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="needs 16 devices, 8 exist"):
        testing.simulated_mesh(kv=16)


def test_a_cache_counts_compilations_from_its_making():
    cache = jaxkv.KVCache(TinyDecoder().spec(), testing.simulated_mesh(kv=2))
    before = cache.stats().compilations
    _make_step()(jnp.zeros(11)).block_until_ready()
    assert cache.stats().compilations > before
