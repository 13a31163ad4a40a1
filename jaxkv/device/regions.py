"""Running a per-shard function under plain jit or inside a caller's own shard_map.

Every device function of jaxkv is written for one shard. `over_shards` wraps it in a
`jax.shard_map` region under Auto or Explicit mesh axes, and calls it as it is where
the caller's shard_map already made the axes Manual.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class ShardGroup:
    """The devices that share one cache: a mesh and the axes that split the pool.

    Attributes:
      mesh: the mesh of the pool.
      axis: the mesh axis over which pages are striped.
      head_axis: the mesh axis that splits KV heads, or None.
    """

    mesh: jax.sharding.Mesh
    axis: str
    head_axis: str | None = None

    @property
    def num_shards(self) -> int:
        """Shards of the group (N)."""
        return self.mesh.shape[self.axis]

    @property
    def head_shards(self) -> int:
        """Devices over which the KV heads are split; 1 without a head axis."""
        return self.mesh.shape[self.head_axis] if self.head_axis else 1

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that the pool is split over."""
        return frozenset({self.axis, self.head_axis} - {None})

    def sharding(self, *spec: str | None) -> NamedSharding:
        """A sharding over the group's mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))


def over_shards(
    function: Callable[..., Any],
    group: ShardGroup,
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """`function` of per-shard arrays as a function of whole arrays.

    Inside a caller's shard_map over the group's axes the arrays are per-shard already
    and `function` itself comes back.

    Args:
      function: takes and returns per-shard arrays; may use collectives over the axes.
      group: the mesh and its axes.
      in_specs: a pytree prefix of PartitionSpecs for each argument.
      out_specs: the same for the results.

    Raises:
      ValueError: the caller's shard_map made only some of the group's axes Manual.
    """
    context = jax.sharding.get_abstract_mesh()
    manual = group.axes & set(context.manual_axes)
    if manual == group.axes:
        return function
    if manual:
        raise ValueError(
            f"the enclosing shard_map is manual over {sorted(manual)} but not over "
            f"{sorted(group.axes - manual)}: name all of the pool's axes or none"
        )
    mesh = group.mesh if context.empty else context
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(group.axes),
        check_vma=False,
    )
    explicit = all(
        kind == AxisType.Explicit
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if name in group.axes
    )
    if not explicit:
        return mapped

    def resharded(*args):
        # Explicit axes want the very shardings that in_specs name
        return mapped(
            *(
                jax.tree.map(
                    lambda spec, part: jax.tree.map(
                        lambda leaf: jax.reshard(leaf, NamedSharding(mesh, spec)), part
                    ),
                    specs,
                    arg,
                    is_leaf=lambda node: isinstance(node, PartitionSpec),
                )
                for specs, arg in zip(in_specs, args, strict=True)
            )
        )

    return resharded
