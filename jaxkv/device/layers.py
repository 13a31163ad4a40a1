"""Driving a decoder's layers over a pool.

    scan carry    x, gathered prefix of this layer (assembled)
    scan in       the layer's parameters, its index        -- never the pool
    scan out      the layer's staged rows                  -- written once, at the end

`scan_layers` compiles one layer, `loop_layers` a Python list of unlike ones; both are
thin over `LayerKV`, which loops that drive layers their own way can use directly, and
over `stage_scan` / `stage_loop`, which leave the write to the caller.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkv.device import assembly, ranges, striped
from jaxkv.device.assembly import PrefixPages
from jaxkv.device.options import AttentionOptions
from jaxkv.device.packing import Plan, plan_specs, unpack_plan
from jaxkv.device.pool import KVPool, write_rows
from jaxkv.device.regions import ShardGroup, over_shards
from jaxkv.plan import StepPlan


class StagedRows(NamedTuple):
    """New rows of one layer or, with a leading axis, of all layers."""

    k: jax.Array  # [N * M, Hk, D], each shard's rows together
    v: jax.Array  # [N * M, Hk, Dv]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """One layer's view of the cache during a step.

    Attributes:
      pool: the pool, read only.
      plan: the step's plan.
      layer: index of the layer in the pool, i32[].
      gathered: this layer's first round of prefix pages, if assembled.
      staged: the rows that `attend` staged; None before it.
      backend: attention backend; static.
    """

    pool: KVPool
    plan: StepPlan
    layer: jax.Array  # i32[]
    gathered: PrefixPages | None
    staged: StagedRows | None = None
    backend: str = dataclasses.field(default="auto", metadata={"static": True})

    @property
    def positions(self) -> jax.Array:
        """Position of each row of this step's tokens, i32[T], split as they are."""
        group, plan = self.pool.group, self.plan

        def own(positions):
            return ranges.own_rows(positions, plan, group.axis)

        token_spec = PartitionSpec(_token_axis(group, plan))
        return over_shards(own, group, (PartitionSpec(),), token_spec)(plan.positions)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
    ) -> tuple[jax.Array, "LayerKV"]:
        """Attends to prefix and chunk, and stages the new rows; once a layer.

        Args:
          q: queries, [T, Hq, D].
          k: the new tokens' keys, [T, Hk, D], positions already encoded.
          v: the new tokens' values, [T, Hk, Dv].
          scale: factor on the scores; `D ** -0.5` where None.
          softcap: where given, scores become `softcap * tanh(score / softcap)`.
          window: tokens that a row sees, itself included; None for all before it.

        Returns:
          Output [T, Hq, Dv] in q's dtype, and the view to return from the block.

        Raises:
          ValueError: a shape does not fit the plan or the pool's spec, or the layer
            has attended already.
        """
        self._check(q, k, v, window)
        group, plan = self.pool.group, self.plan
        options = AttentionOptions(
            axis=group.axis,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            softcap=softcap,
            window=window,
            backend=self.backend,
        )

        def attend_shard(q, k, v, gathered, pool_k, pool_v, plan, layer):
            # attention reads new rows as the pool will hold them: a later step that
            # finds them there computes the same
            k, v = k.astype(pool_k.dtype), v.astype(pool_v.dtype)
            rows = plan.stage_rows[0]
            staged = StagedRows(k[rows], v[rows])
            if plan.is_striped:
                out = striped.attend_striped(
                    q, *staged, pool_k, pool_v, plan, layer, options
                )
            else:
                out, gathered = assembly.attend_assembled(
                    q, k, v, gathered, pool_k, pool_v, plan, layer, options
                )
            return out.astype(q.dtype), gathered, staged

        tokens = PartitionSpec(_token_axis(group, plan), group.head_axis, None)
        pages = PartitionSpec(None, None, group.head_axis, None)
        rows = PartitionSpec(group.axis, group.head_axis, None)
        pool_spec = self.pool.partition_spec
        in_specs = (tokens, tokens, tokens, pages, pool_spec, pool_spec)
        out, gathered, staged = over_shards(
            attend_shard,
            group,
            (*in_specs, plan_specs(plan, group), PartitionSpec()),
            (tokens, pages, rows),
        )(q, k, v, self.gathered, self.pool.k, self.pool.v, plan, self.layer)
        return out, dataclasses.replace(self, gathered=gathered, staged=staged)

    def _check(self, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None):
        if self.staged is not None:
            raise ValueError("attend was called twice in one layer")
        if window is not None and window < 1:
            raise ValueError(f"{window=} must be at least 1 token")
        group, kv = self.pool.group, self.pool.spec.kv
        manual = _is_manual(group)
        heads = kv.num_kv_heads // (group.head_shards if manual else 1)
        num_rows = self.plan.tokens.shape[0]
        for name, array, want in (
            ("q", q, (num_rows, None, kv.head_dim)),
            ("k", k, (num_rows, heads, kv.head_dim)),
            ("v", v, (num_rows, heads, kv.value_dim)),
        ):
            fits = array.ndim == 3 and all(
                size is None or size == have
                for size, have in zip(want, array.shape, strict=True)
            )
            if not fits:
                raise ValueError(f"{name}.shape={array.shape} does not fit {want}")
        if q.shape[1] % heads:
            raise ValueError(
                f"{q.shape[1]} query heads are not a multiple of {heads} KV heads"
            )


def scan_layers(
    block: Callable[[jax.Array, Any, LayerKV], tuple[jax.Array, LayerKV]],
    x: jax.Array,
    params: Any,
    pool: KVPool,
    plan: Plan,
    *,
    attention: str = "auto",
) -> tuple[jax.Array, KVPool]:
    """Runs alike layers as one compiled layer; donate the pool to the jitted caller.

    Args:
      block: `(x, params, kv) -> (x, kv)`; calls `kv.attend` once.
      x: activations, [T, ...].
      params: a pytree whose leaves have the pool's layers as leading axis.
      pool: the pool; read during the scan, written once after it.
      plan: the step's plan.
      attention: name of the attention backend.

    Returns:
      Activations after the last layer, and the pool with the new rows.
    """
    plan = unpack_plan(plan, pool.group)
    x, staged = stage_scan(block, x, params, pool, plan, attention=attention)
    return x, write_rows(pool, *staged, plan)


def loop_layers(
    blocks: Sequence[Callable[[jax.Array, LayerKV], tuple[jax.Array, LayerKV]]],
    x: jax.Array,
    pool: KVPool,
    plan: Plan,
    *,
    attention: str = "auto",
) -> tuple[jax.Array, KVPool]:
    """`scan_layers` for a list of unlike layers, `(x, kv) -> (x, kv)` each."""
    plan = unpack_plan(plan, pool.group)
    x, staged = stage_loop(blocks, x, pool, plan, attention=attention)
    return x, write_rows(pool, *staged, plan)


def stage_scan(
    block: Callable[[jax.Array, Any, LayerKV], tuple[jax.Array, LayerKV]],
    x: jax.Array,
    params: Any,
    pool: KVPool,
    plan: Plan,
    *,
    attention: str = "auto",
) -> tuple[jax.Array, StagedRows]:
    """`scan_layers` without the write: the pool is not needed again and not donated."""
    plan = unpack_plan(plan, pool.group)
    num_layers = pool.spec.num_layers
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(params)}
    if lengths - {num_layers}:
        raise ValueError(
            f"params have leading axes {sorted(lengths)}, the pool has {num_layers=}"
        )

    def body(carry, layer_inputs):
        x, gathered = carry
        layer_params, layer = layer_inputs
        kv = LayerKV(pool, plan, layer, gathered, backend=attention)
        x, gathered, staged = _checked_block(block(x, layer_params, kv))
        return (x, gathered), staged

    x = _place_rows(x, pool, plan)
    layers = jnp.arange(num_layers, dtype=jnp.int32)
    # two layers an iteration: the carried scratch alternates slots and is not copied
    unroll = 1 if plan.is_striped or plan.block == 0 else min(2, num_layers)
    (x, _), staged = lax.scan(
        body, (x, first_gather(pool, plan)), (params, layers), unroll=unroll
    )
    return x, staged


def stage_loop(
    blocks: Sequence[Callable[[jax.Array, LayerKV], tuple[jax.Array, LayerKV]]],
    x: jax.Array,
    pool: KVPool,
    plan: Plan,
    *,
    attention: str = "auto",
) -> tuple[jax.Array, StagedRows]:
    """`loop_layers` without the write."""
    if len(blocks) != pool.spec.num_layers:
        raise ValueError(
            f"{len(blocks)} blocks for a pool of {pool.spec.num_layers} layers"
        )
    plan = unpack_plan(plan, pool.group)
    x = _place_rows(x, pool, plan)
    gathered = first_gather(pool, plan)
    staged = []
    for layer, block in enumerate(blocks):
        kv = LayerKV(pool, plan, jnp.int32(layer), gathered, backend=attention)
        x, gathered, rows = _checked_block(block(x, kv))
        staged.append(rows)
    return x, jax.tree.map(lambda *rows: jnp.stack(rows), *staged)


def first_gather(pool: KVPool, plan: Plan) -> PrefixPages | None:
    """The first layer's first round of prefix pages; None if nothing is assembled."""
    if plan.is_striped or plan.block == 0:
        return None
    group = pool.group
    plan = unpack_plan(plan, group)
    pages = PartitionSpec(None, None, group.head_axis, None)

    def gather(pool_k, pool_v, send_pages):
        return assembly.gather_prefix(
            pool_k, pool_v, send_pages[0, 0], jnp.int32(0), group.axis
        )

    return over_shards(
        gather,
        group,
        (pool.partition_spec, pool.partition_spec, PartitionSpec(group.axis)),
        pages,
    )(pool.k, pool.v, plan.send_pages)


def embed_tokens(table: jax.Array, pool: KVPool, plan: Plan) -> jax.Array:
    """Rows of an embedding table [V, E] for a step's tokens, [T, E], split as they are.

    Plain indexing does the same under Auto axes; Explicit axes need the result's
    sharding, which this gives. The table is taken whole on every shard.
    """
    plan = unpack_plan(plan, pool.group)

    def take(table, tokens):
        return table.at[tokens].get(mode="clip")

    token_spec = PartitionSpec(_token_axis(pool.group, plan))
    return over_shards(take, pool.group, (PartitionSpec(), token_spec), token_spec)(
        table, plan.tokens
    )


def last_rows(x: jax.Array, pool: KVPool, plan: Plan) -> jax.Array:
    """Each sequence's last new row of `x` [T, E], [S, E], on every shard.

    Works for replicated and for sharded tokens, and inside a caller's shard_map.
    """
    group = pool.group
    plan = unpack_plan(plan, group)

    def take(x, rows):
        if plan.num_token_blocks == 1:
            return x[rows]
        local = rows - lax.axis_index(group.axis) * x.shape[0]
        mine = (local >= 0) & (local < x.shape[0])
        taken = x.at[jnp.where(mine, local, 0)].get(mode="clip")
        mine = mine.reshape(-1, *[1] * (x.ndim - 1))
        return lax.psum(jnp.where(mine, taken, 0), group.axis)

    token_spec = PartitionSpec(_token_axis(group, plan))
    return over_shards(take, group, (token_spec, PartitionSpec()), PartitionSpec())(
        x, plan.last_rows
    )


def _token_axis(group: ShardGroup, plan: StepPlan) -> str | None:
    return group.axis if plan.num_token_blocks > 1 else None


def _is_manual(group: ShardGroup) -> bool:
    return group.axis in jax.sharding.get_abstract_mesh().manual_axes


def _place_rows(x: jax.Array, pool: KVPool, plan: StepPlan) -> jax.Array:
    """Pins activations to the plan's token layout, where the compiler would choose."""
    group = pool.group
    context = jax.sharding.get_abstract_mesh()
    mesh = group.mesh if context.empty else context
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds[group.axis] != AxisType.Auto:
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    spec = PartitionSpec(_token_axis(group, plan), *free)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _checked_block(result: Any) -> tuple[jax.Array, PrefixPages | None, StagedRows]:
    x, kv = result
    if not isinstance(kv, LayerKV) or kv.staged is None:
        raise ValueError("a block must call kv.attend once and return the kv it gave")
    return x, kv.gathered, kv.staged
