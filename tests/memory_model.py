"""Steps with a large pool and little else, lowered from shapes, for memory claims.

`build` serves simulated CPU meshes and the deviceless H200 compiler alike.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import jaxkv
from jaxkv.host.buckets import Buckets, StepShape
from jaxkv.host.planner import Planner
from jaxkv.host.request import RequestTable

HEADS = 8
HEAD_DIM = 64
HIDDEN = 256
KV_HEADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """One step's sizes; `shape` has the plan's."""

    num_layers: int
    pages_per_shard: int
    page_size: int
    shape: StepShape
    dtype: str = "bfloat16"

    @property
    def spec(self) -> jaxkv.CacheSpec:
        return jaxkv.CacheSpec(
            num_layers=self.num_layers,
            kv=jaxkv.GQA(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM),
            page_size=self.page_size,
            pages_per_shard=self.pages_per_shard,
            dtype=self.dtype,
        )


def build(mesh, *, geometry: Geometry, head_axis: str | None = None):
    """The jitted step, and its arguments as shapes with shardings."""
    group = jaxkv.ShardGroup(mesh, "kv", head_axis)
    spec = geometry.spec
    table = RequestTable(group.num_shards, spec.page_size)
    sizes = Buckets(tokens=(1,), sequences=(1,), table_widths=(1,), blocks=(1,))
    planner = Planner(
        table=table,
        buckets=sizes,
        pages_per_shard=spec.pages_per_shard,
        num_token_blocks=geometry.shape.num_token_blocks,
        mode="auto",
        queries_per_kv_head=1.0,
    )
    plan = planner.build((), np.zeros(0, np.int32), geometry.shape)
    specs = jaxkv.plan_specs(plan, group)
    plan = jaxkv.StepPlan(
        *(
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s))
            for a, s in zip(plan, specs, strict=True)
        )
    )

    def shaped(dtype, *shape, sharding=None):
        sharding = sharding or group.sharding()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pool_sharding = group.sharding(None, "kv", None, head_axis, None)
    pool_shape = (
        spec.num_layers,
        group.num_shards * spec.pages_per_shard,
        spec.page_size,
        KV_HEADS,
        HEAD_DIM,
    )
    part = shaped(spec.dtype, *pool_shape, sharding=pool_sharding)
    pool = jaxkv.KVPool(part, part, spec, group)
    layers = spec.num_layers
    weights = {
        "qkv": shaped(spec.dtype, layers, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        "o": shaped(spec.dtype, layers, HEADS * HEAD_DIM, HIDDEN),
        "up": shaped(spec.dtype, layers, HIDDEN, 4 * HIDDEN),
        "down": shaped(spec.dtype, layers, 4 * HIDDEN, HIDDEN),
    }
    embed = shaped(spec.dtype, 1024, HIDDEN)

    def block(x, w, kv):
        heads = (x @ w["qkv"]).reshape(x.shape[0], -1, HEAD_DIM)
        q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        out, kv = kv.attend(q, k, v)
        x = x + out.reshape(x.shape[0], -1) @ w["o"]
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], kv

    @functools.partial(
        jax.jit,
        donate_argnames="pool",
        compiler_options=_compiler_options(mesh),
    )
    def step(weights, embed, pool, plan):
        x = jaxkv.embed_tokens(embed, pool, plan)
        x, pool = jaxkv.scan_layers(block, x, weights, pool, plan)
        return jaxkv.last_rows(x, pool, plan), pool

    return step, (weights, embed, pool, plan)


def _compiler_options(mesh):
    if mesh.devices.flat[0].platform == "cpu":
        return None
    return {"xla_gpu_all_gather_combine_threshold_bytes": 2**30}


def build_shape(mesh, *, sizes: list[int], dtype="bfloat16", head_axis=None):
    """`build` with JSON options, for the deviceless compiler."""
    geometry = Geometry(
        num_layers=8,
        pages_per_shard=513,
        page_size=16,
        shape=StepShape(*sizes),
        dtype=dtype,
    )
    return build(mesh, geometry=geometry, head_axis=head_axis)
