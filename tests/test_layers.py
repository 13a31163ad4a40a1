"""Whole steps against the dense oracle: modes, meshes, layouts, axis kinds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_decoder
from jax.sharding import AxisType, PartitionSpec
from tiny_decoder import VOCAB, Runner, TinyDecoder

import jaxkv
from jaxkv import testing
from jaxkv.device.layers import first_gather

HEADS = {"9/3": (9, 3), "32/8": (32, 8), "4/4": (4, 4)}
MODES = ("assembled", "striped")


def _make_cache(decoder, mesh, *, head_axis=None, dtype="float32", **options):
    """A poisoned cache with one shape a mode: few compilations."""
    num_shards = mesh.shape["kv"]
    page_size = options.pop("page_size", 4)
    sequences = max(num_shards, 6)
    buckets = jaxkv.Buckets(
        tokens=(32 * num_shards if options.get("shard_tokens") else 96,),
        sequences=(sequences,),
        table_widths=(8,),
        blocks=(8 * sequences,),
    )
    cache = jaxkv.KVCache(
        decoder.spec(page_size=page_size, pages_per_shard=60, dtype=dtype),
        mesh,
        head_axis=head_axis,
        buckets=options.pop("buckets", buckets),
        **options,
    )
    testing.poison(cache)
    return cache


def _boundary_lengths(num_shards, page_size):
    """Prompt lengths on and next to page and rotation boundaries, a few of each."""
    rotation = num_shards * page_size
    return [1, page_size - 1 or 2, page_size, page_size + 1, rotation, rotation + 1]


def _serve(runner, rng):
    """Prefill, mixed steps, decodes and forks of one ragged batch; bases all differ."""
    cache = runner.cache
    num_shards, page_size = cache.num_shards, cache.spec.page_size
    lengths = _boundary_lengths(num_shards, page_size)
    # one page each: the roots take every owner in turn
    rooted = [cache.open(rng.integers(0, VOCAB, page_size)) for _ in range(num_shards)]
    runner.run([(request, page_size) for request in rooted])
    assert {request.base for request in rooted} == set(range(num_shards))
    requests = [cache.open(rng.integers(0, VOCAB, length)) for length in lengths[:3]]
    runner.run([(request, request.num_tokens) for request in requests])
    late = [cache.open(rng.integers(0, VOCAB, length + 3)) for length in lengths[3:]]
    while any(request.num_uncomputed for request in late):
        # decode steps and prefill chunks in one plan
        for request in requests:
            cache.append(request, int(rng.integers(0, VOCAB)))
        chunks = [(r, min(r.num_uncomputed, 9)) for r in late if r.num_uncomputed]
        runner.run([(requests[0], 1), *chunks, *((r, 1) for r in requests[1:])])
    forks = cache.fork(late[-1], 2)
    assert forks is not None
    for request in (*rooted, late[-1], *forks):
        cache.append(request, rng.integers(0, VOCAB, 2))
    for _ in range(2):
        runner.run([(request, 1) for request in (late[-1], *forks)])
        runner.run([(request, 1) for request in rooted])
    for request in cache.requests:
        cache.close(request)
    assert cache.pages_per_shard() == [0] * num_shards


MESHES = {
    "1": {"kv": 1},
    "3": {"kv": 3},
    "8": {"kv": 8},
    "4x2": {"kv": 4, "heads": 2},
    "2x4": {"kv": 2, "heads": 4},
}
GRID = [
    pytest.param(heads, mesh, mode, shard_tokens, marks=marks)
    for heads, mesh, mode, shard_tokens, marks in (
        (
            heads,
            mesh,
            mode,
            shard_tokens,
            ()
            if (heads, mesh, mode, shard_tokens)
            in {
                ("9/3", "8", "assembled", False),
                ("9/3", "3", "striped", True),
                ("32/8", "2x4", "striped", False),
                ("32/8", "4x2", "assembled", True),
                ("4/4", "1", "assembled", False),
                ("4/4", "4x2", "striped", True),
                ("4/4", "8", "assembled", True),
            }
            else pytest.mark.slow,
        )
        for heads, mesh, mode, shard_tokens in itertools.product(
            HEADS, MESHES, MODES, (False, True)
        )
        if HEADS[heads][1] % MESHES[mesh].get("heads", 1) == 0
    )
]


@pytest.mark.parametrize(("heads", "mesh", "mode", "shard_tokens"), GRID)
def test_steps_equal_the_dense_oracle(heads, mesh, mode, shard_tokens):
    num_heads, num_kv_heads = HEADS[heads]
    decoder = TinyDecoder(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        v_head_dim=12 if heads == "4/4" else 8,
        softcap=5.0 if heads == "32/8" else None,
    )
    cache = _make_cache(
        decoder,
        testing.simulated_mesh(**MESHES[mesh]),
        head_axis="heads" if "heads" in MESHES[mesh] else None,
        mode=mode,
        shard_tokens=shard_tokens,
    )
    runner = Runner(decoder, cache)
    _serve(runner, np.random.default_rng(0))
    assert runner.worst < 5e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_other_page_sizes(mode, page_size):
    decoder = TinyDecoder()
    mesh = testing.simulated_mesh(kv=4)
    cache = _make_cache(
        decoder,
        mesh,
        mode=mode,
        page_size=page_size,
        buckets=jaxkv.Buckets(
            tokens=(128,), sequences=(7,), table_widths=(10,), blocks=(40,)
        ),
    )
    runner = Runner(decoder, cache)
    _serve(runner, np.random.default_rng(1))
    assert runner.worst < 5e-5


@pytest.mark.parametrize("mode", MODES)
def test_windows_are_ranges_too(mode):
    decoder = TinyDecoder(window=7)
    cache = _make_cache(decoder, testing.simulated_mesh(kv=4), mode=mode)
    runner = Runner(decoder, cache)
    _serve(runner, np.random.default_rng(2))
    assert runner.worst < 5e-5


def test_bf16_pools_agree_within_bf16_rounding():
    decoder = TinyDecoder(num_layers=2)
    rows = {}
    for mode in MODES:
        cache = _make_cache(
            decoder, testing.simulated_mesh(kv=4), mode=mode, dtype="bfloat16"
        )
        runner = Runner(decoder, cache)
        request = cache.open(np.arange(40) % VOCAB)
        runner.run([(request, 30)])
        rows[mode] = runner.run([(request, 10)])
        # 8 bits of mantissa in K and V, two layers
        assert runner.worst < 2e-2 * np.abs(rows[mode]).max()
    # the same stored values, summed in another order
    np.testing.assert_allclose(rows["assembled"], rows["striped"], atol=2e-6)


@pytest.mark.parametrize("workspace", [16, 40, 64])
def test_a04_a_prefix_larger_than_the_scratch_takes_whole_rotations(workspace):
    decoder = TinyDecoder(num_layers=2)
    mesh = testing.simulated_mesh(kv=4)
    rotation = 16
    cache = jaxkv.KVCache(
        decoder.spec(),
        mesh,
        mode="assembled",
        keep_prefixes=False,
        buckets=jaxkv.Buckets.make(
            num_shards=4,
            page_size=4,
            max_tokens=96,
            max_sequences=1,
            max_seq_len=96,
            max_prefix_tokens=workspace,
        ),
    )
    testing.poison(cache)
    runner = Runner(decoder, cache)
    for base in range(4):
        for _ in range(base):
            runner.run([(cache.open([1]), 1)])
        request = cache.open(np.arange(71) % VOCAB)
        runner.run([(request, 70)])
        assert request.base == base
        step = cache.plan([(request, 1)])
        assert step is not None
        assert step.plan.num_rounds >= -(-70 // (workspace // rotation * rotation))
        assert step.plan.block == workspace // rotation
        runner.run([(request, 1)])
        for opened in cache.requests:
            cache.close(opened)
    assert runner.worst < 1e-5


def test_a04_a_workspace_below_one_rotation_is_refused():
    with pytest.raises(ValueError, match=r"max_prefix_tokens=15 must be at least one"):
        jaxkv.KVCache(
            TinyDecoder().spec(), testing.simulated_mesh(kv=4), max_prefix_tokens=15
        )


def _run_kind(kind, mode, shard_tokens):
    """The same tokens through one way of driving the step; the rows it returned."""
    decoder = TinyDecoder(num_layers=2)
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = testing.simulated_mesh(axis_type, kv=4, heads=2)
    cache = _make_cache(
        decoder, mesh, head_axis="heads", mode=mode, shard_tokens=shard_tokens
    )
    forward = decoder.forward
    if kind == "loop":
        forward = functools.partial(decoder.forward, loop=True)
    elif kind == "manual":
        forward = functools.partial(_forward_manual, decoder, mesh)
    runner = Runner(decoder, cache, forward)
    requests = [cache.open(np.arange(length) % VOCAB) for length in (23, 9)]
    rows = [runner.run([(requests[0], 20), (requests[1], 2)])]
    rows.append(runner.run([(requests[0], 3), (requests[1], 7)]))
    assert runner.worst < 5e-5
    return np.stack(rows)[:, :2]


def _forward_manual(decoder, mesh, params, pool, plan):
    """A caller's own shard_map, heads split by hand."""
    split_out = PartitionSpec(None, None, "heads")
    params_specs = {
        "embed": PartitionSpec(),
        "q": split_out,
        "k": split_out,
        "v": split_out,
        "o": PartitionSpec(None, "heads"),
    }

    def block(x, w, kv):
        q, k, v = decoder.qkv(x, w)
        angle = (kv.positions * 0.1)[:, None]
        q, k = (tiny_decoder._rotate(part, angle, jnp) for part in (q, k))
        out, kv = kv.attend(q, k, v)
        return x + jax.lax.psum(out.reshape(x.shape[0], -1) @ w["o"], "heads"), kv

    def body(params, pool, plan):
        x = jaxkv.embed_tokens(params["embed"], pool, plan)
        layers = {name: params[name] for name in "qkvo"}
        x, pool = jaxkv.scan_layers(block, x, layers, pool, plan)
        return jaxkv.last_rows(x, pool, plan), pool

    plan_specs = jaxkv.plan_specs(plan, pool.group)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(params_specs, pool.partition_spec, plan_specs),
        out_specs=(PartitionSpec(), pool.partition_spec),
        check_vma=False,
    )(params, pool, plan)


@pytest.mark.parametrize(
    ("mode", "shard_tokens"),
    [
        ("assembled", True),
        ("striped", False),
        pytest.param("assembled", False, marks=pytest.mark.slow),
        pytest.param("striped", True, marks=pytest.mark.slow),
    ],
)
def test_every_way_of_driving_a_step_gives_the_same(mode, shard_tokens):
    want = _run_kind("auto", mode, shard_tokens)
    for kind in ("explicit", "manual", "loop"):
        got = _run_kind(kind, mode, shard_tokens)
        np.testing.assert_allclose(got, want, atol=5e-6)


def test_a_stage_holds_a_range_of_layers():
    decoder = TinyDecoder(num_layers=4)
    mesh = testing.simulated_mesh(kv=2)
    layers = decoder.layer_weights
    stages = [
        jaxkv.KVCache(decoder.spec(num_layers=2, first_layer=first), mesh)
        for first in (0, 2)
    ]
    assert [list(cache.spec.layers) for cache in stages] == [[0, 1], [2, 3]]
    tokens = np.arange(12) % VOCAB
    x = None
    for cache in stages:
        request = cache.open(tokens)
        step = cache.plan([(request, 12)])
        assert step is not None
        held = slice(cache.spec.first_layer, cache.spec.first_layer + 2)
        part = {name: jnp.asarray(layers[name][held]) for name in layers}
        if x is None:
            embed = jnp.asarray(decoder.weights["embed"])
            x = jaxkv.embed_tokens(embed, cache.pool, step.plan)
        x, pool = jax.jit(
            functools.partial(jaxkv.scan_layers, decoder.block), donate_argnums=2
        )(x, part, cache.pool, step.plan)
        cache.commit(step, pool)
    assert x is not None
    np.testing.assert_allclose(x[:12], decoder.dense(tokens), atol=5e-5)


def test_scratch_rows_are_where_translate_says():
    """Fills the pool with each loc's own number and gathers it back."""
    mesh = testing.simulated_mesh(kv=3)
    spec = TinyDecoder(num_layers=1).spec(pages_per_shard=9)
    cache = jaxkv.KVCache(spec, mesh, mode="assembled", max_tokens=64)
    pages = np.arange(3 * 9)
    locs = pages[:, None] * 4 + np.arange(4)
    stored = np.concatenate([locs[pages % 3 == owner] for owner in range(3)])
    shape = cache.pool.k.shape
    filled = np.broadcast_to(stored[None, :, :, None, None], shape).astype(np.float32)
    cache._replace_pool(
        jaxkv.KVPool(
            jax.device_put(filled, cache.pool.k.sharding),
            jax.device_put(filled, cache.pool.v.sharding),
            spec,
            cache.group,
        )
    )
    requests = [cache.open(np.zeros(length, int)) for length in (30, 7, 11)]
    for request in requests:
        step = cache.plan([(request, request.num_tokens - 5)])
        assert step is not None
        cache.commit(step, cache.pool)
    step = cache.plan([(request, 5) for request in requests])
    assert step is not None
    gathered = jax.jit(first_gather)(cache.pool, step.plan)
    assert gathered is not None
    scratch = np.asarray(gathered.k)[..., 0, 0].reshape(-1)
    for request in requests:
        pages = request.pages()
        prefix = np.arange(request.num_computed)
        locs = pages[prefix // 4] * 4 + prefix % 4
        np.testing.assert_array_equal(scratch[step.translate(locs)], locs)


def test_a_block_that_does_not_attend_is_refused():
    mesh = testing.simulated_mesh(kv=2)
    cache = jaxkv.KVCache(TinyDecoder().spec(), mesh)
    step = cache.plan([(cache.open([1, 2]), 2)])
    assert step is not None
    params = {"w": jnp.zeros((3, 1))}
    x = jnp.zeros((step.arrays.tokens.size, 16))
    with pytest.raises(ValueError, match=r"must call kv\.attend once"):
        jaxkv.scan_layers(lambda x, w, kv: (x, kv), x, params, cache.pool, step.plan)
    with pytest.raises(ValueError, match="2 blocks for a pool of 3 layers"):
        jaxkv.loop_layers([lambda x, kv: (x, kv)] * 2, x, cache.pool, step.plan)
    with pytest.raises(ValueError, match=r"leading axes \[4\]"):
        jaxkv.scan_layers(
            lambda x, w, kv: (x, kv), x, jnp.zeros((4, 2)), cache.pool, step.plan
        )


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "message"),
    [
        ((4, 8), (2, 8), None),
        ((4, 9), (2, 9), r"q.shape=\(\d+, 4, 9\) does not fit"),
        ((4, 8), (4, 8), r"k.shape=\(\d+, 4, 8\) does not fit"),
        ((3, 8), (2, 8), "3 query heads are not a multiple of 2 KV heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q_shape, k_shape, message):
    mesh = testing.simulated_mesh(kv=2)
    cache = jaxkv.KVCache(TinyDecoder().spec(), mesh)
    step = cache.plan([(cache.open([1, 2]), 2)])
    assert step is not None
    num_rows = step.arrays.tokens.size
    kv = jaxkv.LayerKV(cache.pool, step.arrays, jnp.int32(0), None)
    q, k = jnp.zeros((num_rows, *q_shape)), jnp.zeros((num_rows, *k_shape))
    if message is None:
        out, kv = kv.attend(q, k, k)
        assert out.shape == (num_rows, 4, 8)
        with pytest.raises(ValueError, match="attend was called twice"):
            kv.attend(q, k, k)
        with pytest.raises(ValueError, match=r"window=0 must be at least 1"):
            jaxkv.LayerKV(cache.pool, step.arrays, jnp.int32(0), None).attend(
                q, k, k, window=0
            )
    else:
        with pytest.raises(ValueError, match=message):
            kv.attend(q, k, k)
