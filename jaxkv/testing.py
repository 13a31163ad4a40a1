"""Tools for testing a serving loop on a laptop: meshes, an oracle, poison, guards.

jaxkv.testing.simulate_devices(8)           # before jax's first use
mesh = jaxkv.testing.simulated_mesh(kv=8)
cache = KVCache(...); jaxkv.testing.poison(cache)
with jaxkv.testing.no_compilation(): ...     # a step that compiles fails the test
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxkv.cache import KVCache
from jaxkv.device.compilations import CompilationCounter
from jaxkv.device.pool import KVPool


def simulate_devices(num_devices: int) -> None:
    """Makes the CPU look like `num_devices` devices; call it before jax's first use."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def simulated_mesh(
    axis_type: AxisType = AxisType.Auto, **axes: int
) -> jax.sharding.Mesh:
    """A mesh over the first devices: `simulated_mesh(kv=4, heads=2)`.

    Raises:
      ValueError: there are fewer devices than the mesh needs.
    """
    needed = int(np.prod(list(axes.values()), dtype=int))
    devices = jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"a mesh of {axes} needs {needed} devices, {len(devices)} exist: call "
            "simulate_devices first"
        )
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(axis_type,) * len(axes),
        devices=devices[:needed],
    )


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    """The dense oracle: causal attention of one whole sequence in float64.

    Args:
      q: [T, Hq, D].
      k: [T, Hk, D].
      v: [T, Hk, Dv].
      scale: factor on the scores; `D ** -0.5` where None.
      softcap: where given, scores become `softcap * tanh(score / softcap)`.
      window: tokens that a row sees, itself included; None for all before it.

    Returns:
      float64[T, Hq, Dv].
    """
    q, k, v = (np.asarray(part, np.float64) for part in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k)
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    age = np.arange(len(q))[:, None] - np.arange(len(q))[None, :]
    seen = age >= 0 if window is None else (age >= 0) & (age < window)
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def poisoned(pool: KVPool) -> KVPool:
    """The pool with NaN in every slot of every page, the reserved ones included."""
    k, v = (
        jnp.full(part.shape, jnp.nan, part.dtype, device=part.sharding)
        for part in (pool.k, pool.v)
    )
    return dataclasses.replace(pool, k=k, v=v)


def poison(cache: KVCache) -> None:
    """Fills an idle cache's pool with NaN, so that a read of an unwritten slot shows.

    Raises:
      ValueError: the cache has open requests, whose tokens would be lost.
    """
    if cache.requests:
        raise ValueError(f"the cache has {len(cache.requests)} open requests")
    cache._replace_pool(poisoned(cache.pool))


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCounter]:
    """Counts XLA compilations of any function inside the context."""
    count = CompilationCounter()
    try:
        yield count
    finally:
        count.stop()


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Fails with AssertionError if anything compiles inside the context."""
    with count_compilations() as count:
        yield
    assert count.value == 0, f"{count.value} programs were compiled"


def assert_pool_aliased(compiled: jax.stages.Compiled, pool: KVPool) -> None:
    """Fails unless a compiled step updates the whole donated pool in place.

    Args:
      compiled: `jax.jit(step, donate_argnums=...).lower(...).compile()`.
      pool: the pool it was lowered with (arrays or shapes).
    """
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this platform gives no memory analysis"
    wanted = pool.spec.pool_bytes(pool.group.head_shards)
    assert analysis.alias_size_in_bytes >= wanted, (
        f"{analysis.alias_size_in_bytes} bytes a device are aliased, the pool has "
        f"{wanted}: donate it, and return the new one with the same sharding"
    )
