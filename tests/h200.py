"""Compile JAX functions for eight H200s on a machine that has none.

XLA needs a description of the target, its CUDA plugin, ptxas and libdevice, but no GPU:
`data/h200_target_config.txtpb` is the first, `toolchain` installs the rest once into
the user's cache. All of it stays out of this process, whose backend is the CPU: a
worker process compiles a list of requests, since its start costs more than a compile.

A builder is a module-level function `builder(mesh, **options)` that returns
`(jitted, args)`: what `jax.jit` returned, and a tuple of `jax.ShapeDtypeStruct` with
`NamedSharding` over the mesh. All sizes in the result are those of one device.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import platformdirs

TESTS = pathlib.Path(__file__).resolve().parent
BIN = pathlib.Path("nvidia", "cu13", "bin")

# the opcode is the first word before a parenthesis: types hold no such word
OPCODE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = .*?\s([a-z][a-z0-9-]*)\(", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One function to compile: its builder and the mesh to build it on."""

    builder: str  # "module:function", importable from tests/, examples/ or the root
    mesh_shape: tuple[int, ...] = (8,)
    axis_names: tuple[str, ...] = ("kv",)
    axis_type: str = "Auto"  # or "Explicit", for every axis
    context_mesh: bool = False  # trace under jax.set_mesh, as a bare P in it needs
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON values


@dataclasses.dataclass(frozen=True)
class Memory:
    """What XLA plans to allocate on each device, in bytes.

    The output counts aliased bytes too, and 8 for every leaf when it is a tuple. XLA
    reports no generated code for a GPU: that field is 0.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    generated_code_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The planned memory and the optimised, scheduled HLO of one request."""

    memory: Memory
    hlo_text: str

    def count(self, opcode: str) -> int:
        """Number of instructions of one opcode, synchronous or started."""
        opcodes = OPCODE.findall(self.hlo_text)
        return opcodes.count(opcode) + opcodes.count(f"{opcode}-start")


def toolchain() -> pathlib.Path:
    """Folder with the CUDA plugin, ptxas and libdevice; installed on first use.

    Raises:
      RuntimeError: If pip can't install them here.
    """
    jaxlib = importlib.metadata.version("jaxlib")
    cache = pathlib.Path(
        os.environ.get("JAXKV_CACHE_DIR") or platformdirs.user_cache_path("jaxkv")
    )
    # the plugin is built for one jaxlib and one Python
    folder = cache / f"cuda13-jaxlib-{jaxlib}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # beside the final place, so that the rename can't cross file systems
    with tempfile.TemporaryDirectory(prefix="installing-", dir=cache) as temporary:
        new = pathlib.Path(temporary, "packages")
        _install(new, jaxlib)
        try:
            os.replace(new, folder)
        except OSError:
            if not folder.is_dir():  # else another process came first with the same
                raise
    return folder


def _install(folder: pathlib.Path, jaxlib: str) -> None:
    """Install the smallest set of packages that compiles: 264 MB of wheels."""
    packages = [
        f"jax-cuda13-pjrt=={jaxlib}",  # XLA for CUDA
        f"jax-cuda13-plugin=={jaxlib}",  # custom calls: Mosaic, Triton, FFI
        "nvidia-cuda-nvcc>=13.0.48,<14",  # ptxas
        "nvidia-nvvm>=13.0.48,<14",  # libdevice: exp, tanh and their like
    ]
    flags = ["--quiet", "--no-input", "--disable-pip-version-check"]
    flags += ["--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    pip = [sys.executable, "-m", "pip", "install", *flags, *packages]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"pip could not install {packages}:\n{done.stdout}{done.stderr}"
        )
    if not (folder / BIN / "ptxas").is_file():
        raise RuntimeError(f"nvidia-cuda-nvcc has no {BIN / 'ptxas'}")


def compile_for_h200(requests: Sequence[Request]) -> list[Compiled]:
    """Compile every request in one worker process; warnings there are errors.

    Raises:
      RuntimeError: If a builder or a compilation fails; holds the worker's traceback.
    """
    packages = toolchain()
    with tempfile.TemporaryDirectory(prefix="h200-") as temporary:
        folder = pathlib.Path(temporary)
        listed = [dataclasses.asdict(request) for request in requests]
        (folder / "requests.json").write_text(json.dumps(listed))
        worker = [sys.executable, "-W", "error", TESTS / "h200_worker.py", folder]
        done = subprocess.run(
            worker, capture_output=True, text=True, env=_environment(packages)
        )
        if done.returncode != 0:
            raise RuntimeError(f"compiling for H200 failed:\n{done.stderr}")
        return [
            Compiled(
                Memory(**json.loads((folder / f"{index}.json").read_text())),
                (folder / f"{index}.hlo").read_text(),
            )
            for index in range(len(requests))
        ]


def _environment(packages: pathlib.Path) -> dict[str, str]:
    """The worker's environment."""
    # flags meant for the tests' CPU devices must not change what XLA compiles here
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_") and name != "XLA_FLAGS"
    }
    root = TESTS.parent
    python_path = [packages, TESTS, root / "examples", root]
    return environment | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PATH": _joined([packages / BIN], environment.get("PATH")),
        "PYTHONPATH": _joined(python_path, environment.get("PYTHONPATH")),
    }


def _joined(first: Sequence[pathlib.Path], rest: str | None) -> str:
    """A search path with some folders put first."""
    return os.pathsep.join([*map(str, first), *([rest] if rest else [])])
