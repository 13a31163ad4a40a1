"""The compiler for absent GPUs: sizes are one device's, aliases and gathers show."""

import jax
import jax.numpy as jnp
import pytest
from h200 import Compiled, Request, compile_for_h200, toolchain
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

POOL_ROWS = 4096  # of one shard
SEND_ROWS = 128  # of one shard
WIDTH = 256
ROW_BYTES = 2 * WIDTH  # bfloat16

MESHES = {
    "auto": Request(builder="test_h200:build_gather"),
    "explicit": Request(builder="test_h200:build_gather", axis_type="Explicit"),
    "explicit_context": Request(
        builder="test_h200:build_gather", axis_type="Explicit", context_mesh=True
    ),
    "two_axes": Request(
        builder="test_h200:build_gather",
        mesh_shape=(4, 2),
        axis_names=("kv", "heads"),
        options={"column_axis": "heads"},
    ),
    "not_donated": Request(builder="test_h200:build_gather", options={"donate": False}),
}


def build_gather(mesh: Mesh, donate: bool = True, column_axis: str | None = None):
    """Gather every shard's rows and write them into its part of a donated pool."""
    sharding = NamedSharding(mesh, P("kv", column_axis))

    @jax.shard_map(mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec)
    def gather_and_write(pool, send):
        gathered = jax.lax.all_gather(send, "kv", tiled=True)
        return jax.lax.dynamic_update_slice(pool, jnp.tanh(gathered), (0, 0))

    num_shards = mesh.shape["kv"]
    args = tuple(
        jax.ShapeDtypeStruct(
            (num_shards * num_rows, WIDTH), jnp.bfloat16, sharding=sharding
        )
        for num_rows in (POOL_ROWS, SEND_ROWS)
    )
    return jax.jit(gather_and_write, donate_argnums=0 if donate else ()), args


def build_unusable_donation(mesh: Mesh):
    """Donate a buffer that no output can take: JAX warns."""
    rows = jax.ShapeDtypeStruct(
        (POOL_ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("kv"))
    )
    # without a known output sharding JAX leaves the matter to XLA, which is silent
    replicated = NamedSharding(mesh, P())
    return jax.jit(jnp.sum, donate_argnums=0, out_shardings=replicated), (rows,)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return dict(zip(MESHES, compile_for_h200(list(MESHES.values())), strict=True))


@pytest.mark.parametrize("name", ["auto", "explicit", "explicit_context"])
def test_sizes_are_those_of_one_device(compiled, name):
    memory = compiled[name].memory
    assert memory.argument_bytes == (POOL_ROWS + SEND_ROWS) * ROW_BYTES
    assert memory.output_bytes == POOL_ROWS * ROW_BYTES
    assert memory.alias_bytes == POOL_ROWS * ROW_BYTES
    gathered_bytes = 8 * SEND_ROWS * ROW_BYTES
    assert gathered_bytes <= memory.temporary_bytes < 2 * gathered_bytes
    assert memory.peak_bytes == memory.argument_bytes + memory.temporary_bytes
    assert memory.generated_code_bytes == 0


def test_a_second_axis_divides_the_columns(compiled):
    memory = compiled["two_axes"].memory
    assert memory.alias_bytes == POOL_ROWS * ROW_BYTES // 2
    assert memory.argument_bytes == (POOL_ROWS + SEND_ROWS) * ROW_BYTES // 2


def test_without_donation_nothing_is_aliased(compiled):
    assert compiled["not_donated"].memory.alias_bytes == 0
    assert compiled["not_donated"].count("copy") == 1
    assert compiled["auto"].count("copy") == 0


@pytest.mark.parametrize("name", MESHES)
def test_one_all_gather(compiled, name):
    assert compiled[name].count("all-gather") == 1
    assert compiled[name].count("all-reduce") == 0
    num_rows = SEND_ROWS * MESHES[name].mesh_shape[0]
    assert f"bf16[{num_rows}," in compiled[name].hlo_text


def test_opcodes_are_told_from_names_and_metadata():
    hlo_text = """
ENTRY %main.1 (all-gather.2: f32[8]) -> f32[8] {
  %all-gather.2 = f32[8]{0:S(1)} parameter(0), metadata={op_name="all-gather(x)"}
  %gathering = (f32[8]{0}, /*index=1*/f32[64]{0}) all-gather-start(%all-gather.2)
  %gathered = f32[64]{0} all-gather-done(%gathering)
  ROOT %copy.1 = f32[8]{0} slice(%gathered), slice={[0:8]}
}
"""
    compiled = Compiled(memory=None, hlo_text=hlo_text)  # pyright: ignore
    opcodes = ("parameter", "all-gather", "all-gather-done", "slice", "copy")
    assert [compiled.count(opcode) for opcode in opcodes] == [1, 1, 1, 1, 0]


def test_a_warning_in_the_worker_is_an_error():
    with pytest.raises(RuntimeError, match="donated buffers were not usable"):
        compile_for_h200([Request(builder="test_h200:build_unusable_donation")])


def test_a_failed_install_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKV_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(RuntimeError, match="jax-cuda13-pjrt"):
        toolchain()
    assert list(tmp_path.iterdir()) == []
