"""Memory claims, from XLA's own buffer assignment: no timing, no sampling.

alias       the whole pool, so that a step never holds it twice
temporaries <= 2 scratch slots + the sent block + staged rows + activations
"""

import pytest
from h200 import Request, compile_for_h200
from memory_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Geometry, build

from jaxkv import testing
from jaxkv.host.buckets import StepShape

N = 8
L = 8
PAGE = 16
KEYS = 64  # of one block of the reference attention
# per token, float32: three score blocks of 64 keys, five rows of query heads (query,
# output, accumulator, two parts), and the decoder's own rows; twice, for tile padding
ACTIVATION_BYTES = 2 * 4 * (3 * HEADS * KEYS + 5 * HEADS * HEAD_DIM + 8 * HIDDEN)


def _bound(shape: StepShape, itemsize: int) -> int:
    row = 2 * KV_HEADS * HEAD_DIM * itemsize
    slot = N * shape.block * PAGE * row
    sent = shape.block * PAGE * row
    if shape.num_token_blocks == 1:
        staged = min(
            shape.num_tokens, shape.num_tokens // N + shape.num_sequences * PAGE
        )
    else:
        staged = shape.num_tokens // N
    activations = shape.num_tokens * ACTIVATION_BYTES
    # each tile holds one block of keys and values: as read, in float32, without bad
    # values, and laid out for the product
    tiles = min(shape.num_tokens, shape.num_tokens // 32 + shape.num_sequences)
    activations += tiles * 4 * KEYS * 2 * KV_HEADS * HEAD_DIM * 4
    return 2 * slot + sent + L * staged * row + activations


def _shape(num_tokens, num_sequences, width, num_rounds, block, num_token_blocks):
    return StepShape(
        num_tokens, num_sequences, width, num_rounds, block, num_token_blocks
    )


SHAPES = {
    "assembled": _shape(512, 2, 64, 1, 512, 1),
    "assembled, tokens sharded": _shape(512, 2, 64, 1, 512, N),
    "assembled, two rounds": _shape(512, 2, 64, 2, 256, 1),
    "striped": _shape(512, 2, 64, 0, 0, 1),
    "striped, tokens sharded": _shape(512, 2, 64, 0, 0, N),
    "decode": _shape(8, 8, 64, 0, 0, 1),
}


def _geometry(shape: StepShape) -> Geometry:
    return Geometry(
        num_layers=L, pages_per_shard=513, page_size=PAGE, shape=shape, dtype="float32"
    )


@pytest.mark.parametrize("name", SHAPES)
def test_pool_is_aliased_and_temporaries_are_bounded(name):
    shape = SHAPES[name]
    step, args = build(testing.simulated_mesh(kv=N), geometry=_geometry(shape))
    compiled = step.lower(*args).compile()
    testing.assert_pool_aliased(compiled, args[2])
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries <= _bound(shape, itemsize=4)


def test_striped_temporaries_do_not_grow_with_the_prefix():
    sizes = []
    for width in (16, 256):
        shape = _shape(64, 2, width, 0, 0, 1)
        step, args = build(testing.simulated_mesh(kv=N), geometry=_geometry(shape))
        sizes.append(step.lower(*args).compile().memory_analysis().temp_size_in_bytes)
    page_table_bytes = 4 * 2 * (256 - 16)
    # the table is gathered a sequence and a tile at a time
    assert sizes[1] - sizes[0] <= 4 * page_table_bytes


def test_scratch_bytes_of_the_spec_is_the_scratch_that_a_step_holds():
    shape = SHAPES["assembled"]
    spec = _geometry(shape).spec
    slots = 2 * N * shape.block * PAGE * 2 * KV_HEADS * HEAD_DIM * 4
    chunk = 2 * (shape.num_tokens + PAGE) * 2 * KV_HEADS * HEAD_DIM * 4
    assert spec.scratch_bytes(N * shape.block * PAGE, shape.num_tokens) == slots + chunk


def test_token_wise_work_is_one_nth_where_tokens_are_sharded():
    flops = []
    for num_token_blocks in (1, N):
        # no prefix and one sequence: nearly all work is token-wise
        shape = _shape(512, 1, 1, 1, 0, num_token_blocks)
        step, args = build(testing.simulated_mesh(kv=N), geometry=_geometry(shape))
        costs = step.lower(*args).compile().cost_analysis()
        assert costs is not None
        flops.append(costs["flops"])
    token_wise = 2 * 512 * HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM
    token_wise += 2 * 512 * HIDDEN * 8 * HIDDEN
    # XLA counts a scan's body once for each unrolled layer, whatever its trip count
    assert flops[0] >= token_wise
    assert flops[1] <= flops[0] / N * 1.25


def test_on_8_h200s_the_same_holds():
    shapes = [
        SHAPES["assembled"],
        SHAPES["striped, tokens sharded"],
    ]
    requests = [
        Request(builder="memory_model:build_shape", options={"sizes": list(shape)})
        for shape in shapes
    ]
    pool_bytes = _geometry(shapes[0]).spec.pool_bytes() // 2  # bfloat16 there
    for shape, compiled in zip(shapes, compile_for_h200(requests), strict=True):
        assert compiled.memory.alias_bytes >= pool_bytes
        assert compiled.memory.temporary_bytes <= _bound(shape, itemsize=2)
