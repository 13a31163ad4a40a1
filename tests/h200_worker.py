"""The process that compiles: reads a folder's requests, writes its results there.

Run by `h200.compile_for_h200`, which sets the environment that this needs.
"""

import importlib
import json
import math
import pathlib
import sys
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

TARGET = pathlib.Path(__file__).parent / "data" / "h200_target_config.txtpb"


def make_mesh(request: dict[str, Any]) -> Mesh:
    """A mesh over the H200s of one host, which exist only for the compiler."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x1x{math.prod(request['mesh_shape'])}",  # one slice, one host
        target_config=TARGET.read_text(),
    )
    axis_names = tuple(request["axis_names"])
    mesh = topologies.make_mesh(topology, request["mesh_shape"], axis_names)
    axis_types = (AxisType[request["axis_type"]],) * len(axis_names)
    # topologies.make_mesh takes no axis types
    return Mesh(mesh.devices, axis_names, axis_types=axis_types)


def compile_request(request: dict[str, Any]) -> jax.stages.Compiled:
    """Build one request's function on its mesh and compile it."""
    mesh = make_mesh(request)
    module, _, name = request["builder"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    jitted, args = builder(mesh, **request["options"])
    if not request["context_mesh"]:
        return jitted.lower(*args).compile()
    with jax.set_mesh(mesh):
        return jitted.lower(*args).compile()


def main(folder: pathlib.Path) -> None:
    """Compile every request of a folder."""
    requests = json.loads((folder / "requests.json").read_text())
    for index, request in enumerate(requests):
        try:
            compiled = compile_request(request)
        except Exception as error:
            error.add_note(f"while compiling {request}")
            raise
        sizes, hlo_text = compiled.memory_analysis(), compiled.as_text()
        assert sizes is not None
        assert hlo_text is not None
        memory = {
            "argument_bytes": sizes.argument_size_in_bytes,
            "output_bytes": sizes.output_size_in_bytes,
            "alias_bytes": sizes.alias_size_in_bytes,
            "temporary_bytes": sizes.temp_size_in_bytes,
            "generated_code_bytes": sizes.generated_code_size_in_bytes,
            "peak_bytes": sizes.peak_memory_in_bytes,
        }
        (folder / f"{index}.json").write_text(json.dumps(memory))
        (folder / f"{index}.hlo").write_text(hlo_text)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
