"""A step's plan as one array: a step costs one copy to the devices, not fifteen.

    data[r]    all that shard r needs: its own part of split arrays, the others whole
    layout     where each field lies in a row, and its shape: static

The jitted step unpacks it per shard, which moves nothing.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxkv.device.regions import ShardGroup, over_shards
from jaxkv.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class PlanLayout:
    """The static half of a packed plan.

    Attributes:
      shapes: shape of each field of a StepPlan, in one shard's view.
      is_striped, num_token_blocks, num_rounds, block: as StepPlan has them.
    """

    shapes: tuple[tuple[int, ...], ...]
    is_striped: bool
    num_token_blocks: int
    num_rounds: int
    block: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A StepPlan as one array over the shard group; a pytree of that array.

    Every function of jaxkv that takes a plan takes this one too; `unpack_plan` gives
    its fields.
    """

    data: jax.Array  # i32[N, X], split over the axis
    layout: PlanLayout = dataclasses.field(metadata={"static": True})

    @property
    def is_striped(self) -> bool:
        """Queries travel (striped) instead of keys (assembled)."""
        return self.layout.is_striped

    @property
    def num_token_blocks(self) -> int:
        """1 where tokens are replicated over the shard group, else its size."""
        return self.layout.num_token_blocks

    @property
    def num_rounds(self) -> int:
        """Gathers a layer; 0 if striped."""
        return self.layout.num_rounds

    @property
    def block(self) -> int:
        """Pages that each shard sends in one gather."""
        return self.layout.block


type Plan = StepPlan | PackedPlan


def plan_specs(plan: Plan, group: ShardGroup) -> Any:
    """How a plan is split: PartitionSpecs of its arrays, for a caller's shard_map."""
    split = PartitionSpec(group.axis)
    if isinstance(plan, PackedPlan):
        return split
    return _specs(plan, group)


def pack_plan(plan: StepPlan, group: ShardGroup) -> PackedPlan:
    """Copies a host plan (numpy) to the group's devices, as one array."""
    specs = _specs(plan, group)
    num_shards = group.num_shards
    columns, shapes = [], []
    for array, spec in zip(plan, specs, strict=True):
        if spec == PartitionSpec(group.axis):
            shapes.append((array.shape[0] // num_shards, *array.shape[1:]))
            columns.append(array.reshape(num_shards, -1))
        else:
            shapes.append(array.shape)
            columns.append(np.broadcast_to(array.ravel(), (num_shards, array.size)))
    layout = PlanLayout(
        tuple(shapes),
        plan.is_striped,
        plan.num_token_blocks,
        plan.num_rounds,
        plan.block,
    )
    data = np.concatenate(columns, axis=1)
    return PackedPlan(jax.device_put(data, group.sharding(group.axis)), layout)


def unpack_plan(plan: Plan, group: ShardGroup) -> StepPlan:
    """The fields of a plan, inside a jitted step; a StepPlan comes back as it is."""
    if isinstance(plan, StepPlan):
        return plan
    layout = plan.layout

    def unpack(data):
        fields, start = [], 0
        for shape in layout.shapes:
            size = math.prod(shape)
            fields.append(data[0, start : start + size].reshape(shape))
            start += size
        return StepPlan(*fields)

    return over_shards(
        unpack, group, (PartitionSpec(group.axis),), _specs(plan, group)
    )(plan.data)


def _specs(plan: Plan, group: ShardGroup) -> StepPlan:
    replicated, split = PartitionSpec(), PartitionSpec(group.axis)
    return StepPlan(
        tokens=split if plan.num_token_blocks > 1 else replicated,
        positions=replicated,
        seq_ids=replicated,
        num_rows=replicated,
        cu_q_lens=replicated,
        chunk_rows=replicated,
        last_rows=replicated,
        prefix_lens=replicated,
        bases=replicated,
        page_table=split if plan.is_striped else replicated,
        round_starts=replicated,
        send_pages=split,
        stage_rows=split,
        stage_cu_lens=split,
        write_rows=split,
    )
