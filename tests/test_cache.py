import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import VOCAB, Runner, TinyDecoder

import jaxkv
from jaxkv import testing

DECODER = TinyDecoder(num_layers=2)


def _make_cache(num_shards=4, *, decoder=DECODER, pages_per_shard=20, **options):
    options = {
        "buckets": jaxkv.Buckets(
            tokens=(4, 40), sequences=(4,), table_widths=(8,), blocks=(16,)
        ),
        "mode": "striped",
        **options,
    }
    mesh = testing.simulated_mesh(kv=num_shards)
    cache = jaxkv.KVCache(
        decoder.spec(pages_per_shard=pages_per_shard), mesh, **options
    )
    testing.poison(cache)
    return cache


@pytest.fixture(scope="module")
def forward():
    """One jitted step for all caches of a geometry."""
    return jax.jit(
        DECODER.forward,
        donate_argnames="pool",
        compiler_options={"xla_backend_optimization_level": 0},
    )


def _make_params():
    return {name: jnp.asarray(array) for name, array in DECODER.weights.items()}


def _run(cache, forward, batch):
    step = cache.plan(batch)
    assert step is not None
    rows, pool = forward(_make_params(), pool=cache.pool, plan=step.plan)
    cache.commit(step, pool)
    return np.asarray(rows)[: len(batch)]


def test_200_decode_steps_of_growing_requests_compile_nothing_after_warm_up(forward):
    buckets = jaxkv.Buckets(
        tokens=(4, 40), sequences=(4,), table_widths=(4, 16), blocks=(16,)
    )
    cache = _make_cache(mode="auto", pages_per_shard=60, buckets=buckets)
    params = _make_params()
    for step in cache.warmup_steps():
        _, pool = forward(params, pool=cache.pool, plan=step.plan)
        cache.commit(step, pool)
    requests = [cache.open(np.arange(length) % VOCAB) for length in (10, 7, 1)]
    with testing.no_compilation():
        step = cache.plan([(r, r.num_tokens) for r in requests])
        for index in range(200):
            assert step is not None
            rows, pool = forward(params, pool=cache.pool, plan=step.plan)
            cache.commit(step, pool)
            for request in requests[: 1 + index % 3]:
                cache.append(request, index % VOCAB)
            step = cache.plan([(r, 1) for r in requests[: 1 + index % 3]])
        np.asarray(rows)
    want = DECODER.dense(requests[0].tokens[: requests[0].num_computed])[-1]
    np.testing.assert_allclose(rows[0], want, atol=5e-5)


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_a11_warm_up_covers_every_size_that_runs(page_size):
    decoder = TinyDecoder(num_layers=1)
    cache = jaxkv.KVCache(
        decoder.spec(page_size=page_size, pages_per_shard=60),
        testing.simulated_mesh(kv=2),
        buckets=jaxkv.Buckets(
            tokens=(3, 30),
            sequences=(3,),
            table_widths=tuple(sorted({1, -(-16 // (2 * page_size))})),
            blocks=(1,),
        ),
        mode="striped",
    )
    forward = jax.jit(
        decoder.forward,
        donate_argnames="pool",
        compiler_options={"xla_backend_optimization_level": 0},
    )
    params = {name: jnp.asarray(array) for name, array in decoder.weights.items()}
    for step in cache.warmup_steps():
        _, pool = forward(params, pool=cache.pool, plan=step.plan)
        cache.commit(step, pool)
    with testing.no_compilation():
        for lengths in ((10, 7, 1), (10, 10, 10), (1,)):
            requests = [cache.open([1] * length) for length in lengths]
            batch = [(request, request.num_uncomputed) for request in requests]
            for _ in range(3):
                step = cache.plan(batch)
                assert step is not None
                _, pool = forward(params, pool=cache.pool, plan=step.plan)
                cache.commit(step, pool)
                for request in requests:
                    cache.append(request, 2)
                batch = [(request, 1) for request in requests]
            for request in requests:
                cache.close(request)


def test_a12_only_the_pool_is_donated(forward):
    cache = _make_cache()
    params = _make_params()
    request = cache.open([1, 2, 3])
    step = cache.plan([(request, 3)])
    assert step is not None
    old = cache.pool
    _, pool = forward(params, pool=old, plan=step.plan)
    cache.commit(step, pool)
    assert old.k.is_deleted()
    assert old.v.is_deleted()
    assert cache.pool is pool
    for array in jax.tree.leaves(step.plan):
        np.asarray(array)  # still readable
    live = sum(
        array.nbytes
        for array in jax.live_arrays()
        if array.shape == cache.pool.k.shape and not array.is_deleted()
    )
    assert live == cache.pool.k.nbytes + cache.pool.v.nbytes
    # the same plan can run again: nothing in it was consumed
    _, pool = forward(params, pool=cache.pool, plan=step.plan)
    with pytest.raises(jaxkv.StalePlanError):
        cache.commit(step, pool)


def test_a_step_that_raises_leaves_pool_and_host_as_they_were(forward):
    cache = _make_cache()
    request = cache.open(np.arange(9))
    _run(cache, forward, [(request, 4)])
    step = cache.plan([(request, 5)])
    assert step is not None
    before = np.asarray(cache.pool.k)

    @functools.partial(jax.jit, donate_argnames="pool")
    def broken(params, pool, plan):
        DECODER.forward(params, pool, plan)
        raise RuntimeError("out of cheese")

    with pytest.raises(RuntimeError, match="out of cheese"):
        broken(_make_params(), pool=cache.pool, plan=step.plan)
    np.testing.assert_array_equal(cache.pool.k, before)
    assert request.num_computed == 4
    rows, pool = forward(_make_params(), pool=cache.pool, plan=step.plan)
    cache.commit(step, pool)
    np.testing.assert_allclose(rows[0], DECODER.dense(np.arange(9))[-1], atol=5e-5)


def test_a_step_that_fails_while_it_runs_keeps_a_pool_that_was_not_donated(forward):
    # one device: a callback's failure on one of several leaves the others waiting
    cache = _make_cache(1)
    request = cache.open(np.arange(9))
    step = cache.plan([(request, 9)])
    assert step is not None
    failing = [True]

    def check(x):
        if failing[0]:
            raise RuntimeError("lost device")
        return x

    @jax.jit
    def stage(params, pool, plan):
        x = jaxkv.embed_tokens(params["embed"], pool, plan)
        x = jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        layers = {name: params[name] for name in "qkvo"}
        x, staged = jaxkv.stage_scan(DECODER.block, x, layers, pool, plan)
        return jaxkv.last_rows(x, pool, plan), staged

    with pytest.raises(jax.errors.JaxRuntimeError, match="lost device"):
        jax.block_until_ready(stage(_make_params(), cache.pool, step.plan))
    failing[0] = False
    rows, staged = stage(_make_params(), cache.pool, step.plan)
    cache.commit(step, staged)
    np.testing.assert_allclose(rows[0], DECODER.dense(np.arange(9))[-1], atol=5e-5)
    cache.append(request, 7)
    rows = _run(cache, forward, [(request, 1)])
    np.testing.assert_allclose(rows[0], DECODER.dense(request.tokens)[-1], atol=5e-5)


def test_a_donated_pool_that_never_came_back_is_named(forward):
    cache = _make_cache()
    step = cache.plan([(cache.open([1]), 1)])
    assert step is not None
    forward(_make_params(), pool=cache.pool, plan=step.plan)
    with pytest.raises(jaxkv.StalePlanError, match="never committed"):
        _ = cache.pool


def test_forks_share_full_pages_and_copy_the_partial_one(forward):
    cache = _make_cache()
    runner = Runner(DECODER, cache, DECODER.forward)
    request = cache.open(np.arange(10))
    runner.run([(request, 10)])
    held = sum(cache.pages_per_shard())
    forks = cache.fork(request, 3)
    assert forks is not None
    assert sum(cache.pages_per_shard()) == held + 3
    for fork in forks:
        np.testing.assert_array_equal(fork.pages()[:2], request.pages()[:2])
        assert fork.pages()[2] != request.pages()[2]
        assert fork.pages()[2] % 4 == request.pages()[2] % 4
        cache.append(fork, 3 + fork.id)
    cache.close(request)
    runner.run([(fork, 1) for fork in forks])
    assert runner.worst < 5e-5
    for fork in forks:
        cache.close(fork)
    assert cache.pages_per_shard() == [0] * 4


def test_a_fork_without_room_changes_nothing(forward):
    cache = _make_cache(pages_per_shard=3)
    request = cache.open(np.arange(30))
    _run(cache, forward, [(request, 30)])
    assert cache.fork(request, 2) is None
    assert cache.requests == (request,)
    assert sum(cache.pages_per_shard()) == 8


def test_no_room_is_none_and_changes_nothing(forward):
    cache = _make_cache(pages_per_shard=3)
    # 4 shards x 2 usable pages x 4 tokens; another prompt than the first's
    first, second = cache.open(np.arange(24)), cache.open(np.arange(3, 11))
    assert cache.open(np.arange(1)) is None
    _run(cache, forward, [(first, 24)])
    _run(cache, forward, [(second, 8)])
    cache.append(first, 1)
    held = cache.pages_per_shard()
    assert cache.plan([(first, 1)]) is None
    assert (first.num_pages, cache.pages_per_shard()) == (6, held)
    cache.preempt(second)
    with pytest.raises(ValueError, match="request 1 is preempted: resume it first"):
        cache.plan([(second, 1)])
    rows = _run(cache, forward, [(first, 1)])
    np.testing.assert_allclose(rows[0], DECODER.dense(first.tokens)[-1], atol=5e-5)
    assert not cache.resume(second)
    cache.close(first)
    assert cache.resume(second)
    rows = _run(cache, forward, [(second, 8)])
    np.testing.assert_allclose(rows[0], DECODER.dense(second.tokens)[-1], atol=5e-5)
    with pytest.raises(ValueError, match="request 1 is not preempted"):
        cache.resume(second)


def test_a_prompt_in_flight_is_reused_before_its_request_ends(forward):
    cache = _make_cache()
    first = cache.open(np.arange(20))
    _run(cache, forward, [(first, 10)])
    second = cache.open(np.arange(18))
    assert second.num_computed == 8
    np.testing.assert_array_equal(second.pages()[:2], first.pages()[:2])
    rows = _run(cache, forward, [(second, 10), (first, 10)])
    np.testing.assert_allclose(rows[0], DECODER.dense(np.arange(18))[-1], atol=5e-5)
    np.testing.assert_allclose(rows[1], DECODER.dense(np.arange(20))[-1], atol=5e-5)
    # both computed page 2 and 3; one copy is kept, and both read it
    np.testing.assert_array_equal(second.pages()[:4], first.pages()[:4])
    cache.append(first, 5)
    rows = _run(cache, forward, [(first, 1)])
    np.testing.assert_allclose(rows[0], DECODER.dense(first.tokens)[-1], atol=5e-5)
    stats = cache.stats()
    assert stats.hit_tokens == 8
    assert stats.computed_tokens == 31


def test_namespaces_share_nothing(forward):
    cache = _make_cache()
    request = cache.open(np.arange(20), jaxkv.Namespace(salt="a"))
    _run(cache, forward, [(request, 20)])
    assert cache.open(np.arange(20), jaxkv.Namespace(salt="b")).num_computed == 0
    assert cache.open(np.arange(20)).num_computed == 0
    assert cache.open(np.arange(20), jaxkv.Namespace(salt="a")).num_computed == 16
    with pytest.raises(jaxkv.PageAccountingError, match="pages are leased"):
        cache.clear()
    for opened in cache.requests:
        cache.close(opened)
    cache.clear()
    assert cache.stats().free_pages.tolist() == [19] * 4


def test_events_tell_what_enters_and_leaves(forward):
    events = []
    cache = _make_cache(event_sink=events.append)
    request = cache.open(np.arange(10))
    _run(cache, forward, [(request, 10)])
    cache.close(request)
    cache.clear()
    stored, cleared = events
    assert stored.token_ids == tuple(range(8))
    assert (len(stored.page_hashes), stored.parent_hash) == (2, None)
    assert type(cleared).__name__ == "CacheCleared"


@pytest.mark.parametrize("mode", ["striped", "assembled", "auto"])
def test_a_batch_over_the_steps_capacity_is_deferred(mode):
    cache = _make_cache(mode=mode)
    requests = [cache.open(np.arange(12) % VOCAB) for _ in range(5)]
    assert cache.plan([(request, 12) for request in requests[:4]]) is None  # tokens
    assert cache.plan([(request, 1) for request in requests]) is None  # sequences
    assert all(request.num_pages == 0 for request in requests)


def test_a_batch_whose_prefixes_exceed_the_scratch_is_deferred_or_striped(forward):
    buckets = jaxkv.Buckets(
        tokens=(4, 40), sequences=(4,), table_widths=(8,), blocks=(1,)
    )
    for mode in ("assembled", "auto"):
        cache = _make_cache(mode=mode, buckets=buckets)
        requests = [cache.open(np.arange(first, 20 + first)) for first in (0, 7)]
        for request in requests:
            step = cache.plan([(request, 16)])
            assert step is not None
            cache.commit(step, cache.pool)
        step = cache.plan([(request, 3) for request in requests])
        assert (step is None) == (mode == "assembled")


def test_auto_reads_by_its_cost_model():
    cache = _make_cache(mode="auto", query_heads=4)
    request = cache.open(np.arange(60) % VOCAB)
    first = cache.plan([(request, 40)])
    assert first is not None
    assert first.mode == "assembled"
    cache.commit(first, cache.pool)
    few = cache.plan([(request, 2)])
    assert few is not None
    assert few.mode == "striped"
    with pytest.raises(ValueError, match="no single scratch"):
        few.translate(np.array([16]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reserve_pages": -1}, "reserve_pages=-1 must be at least 0"),
        ({"max_seq_len": 0}, "max_seq_len=0 must be at least 1"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"query_heads": 0}, "query_heads=0 must be at least 1"),
        ({"mode": "both"}, "mode='both' is not one of"),
        ({"attention": "magic"}, "attention='magic' is not one of"),
        ({"axis": "ring"}, "axis 'ring' is not in the mesh"),
        ({"head_axis": "ring"}, "axis 'ring' is not in the mesh"),
        ({"query_heads": 3}, "query_heads=3 is not a multiple of 2 KV heads"),
        ({"max_seq_len": 10_000}, "max_seq_len=10000 tokens exceeds the pool's"),
        ({"buckets": None, "max_tokens": 0}, "max_tokens=0 must be at least 1"),
        (
            {"buckets": None, "max_tokens": 4, "max_sequences": 5},
            "max_tokens=4 must be at least max_sequences=5",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _make_cache(**options)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([], ValueError, "at least one token"),
        ([1.5], TypeError, "tokens must be integers, got float64"),
        ([True], TypeError, "tokens must be integers, got bool"),
        ([[1, 2]], ValueError, r"tokens have shape \(1, 2\)"),
        ([1, -1], ValueError, "token -1 at index 1 is outside 0..49"),
        ([50], ValueError, "token 50 at index 0 is outside 0..49"),
        ([2**40], ValueError, "token 1099511627776 at index 0"),
    ],
)
def test_bad_tokens_are_refused_at_open_and_append(tokens, error, message):
    cache = _make_cache(vocab_size=VOCAB)
    with pytest.raises(error, match=message):
        cache.open(tokens)
    assert cache.requests == ()
    request = cache.open([1])
    if tokens:
        with pytest.raises(error, match=message):
            cache.append(request, tokens)
        assert request.num_tokens == 1


def test_a_prompt_longer_than_capacity_is_refused_saying_what_fits():
    cache = _make_cache(pages_per_shard=5, buckets=None)
    # 4 shards x 4 usable pages x 4 tokens
    with pytest.raises(jaxkv.CapacityError, match="exceeds the 64 tokens"):
        cache.open([0] * 65)
    request = cache.open([0] * 64)
    with pytest.raises(jaxkv.CapacityError, match="num_tokens=65 exceeds the 64"):
        cache.append(request, 1)
    assert request.num_tokens == 64


def test_closed_requests_are_refused(forward):
    cache = _make_cache()
    request = cache.open([1, 2])
    cache.close(request)
    for use in (
        lambda: cache.close(request),
        lambda: cache.abort(request),
        lambda: cache.append(request, 1),
        lambda: cache.plan([(request, 1)]),
        lambda: cache.fork(request, 1),
        lambda: request.tokens,
        request.pages,
    ):
        with pytest.raises(jaxkv.ClosedRequestError, match="request 0 is closed"):
            use()
    assert repr(request) == "Request(id=0, closed)"


def test_what_is_no_request_is_refused():
    with pytest.raises(TypeError, match="did open return None"):
        _make_cache().plan([(None, 1)])


def test_a_request_may_end_or_lose_its_pages_while_its_step_runs(forward):
    cache = _make_cache()
    closed, preempted, kept = (
        cache.open(np.arange(first, 12 + first)) for first in range(3)
    )
    step = cache.plan([(request, 12) for request in (closed, preempted, kept)])
    _, pool = forward(_make_params(), pool=cache.pool, plan=step.plan)
    cache.abort(closed)
    cache.preempt(preempted)
    assert cache.resume(preempted)
    cache.commit(step, pool)
    assert (preempted.num_computed, kept.num_computed) == (0, 12)
    other = cache.open(np.arange(20, 40))
    cache.append(kept, 5)
    rows = _run(cache, forward, [(other, 20), (preempted, 12), (kept, 1)])
    for row, request in zip(rows, (other, preempted, kept), strict=True):
        np.testing.assert_allclose(row, DECODER.dense(request.tokens)[-1], atol=5e-5)


def test_another_caches_request_is_refused():
    request = _make_cache().open([1])
    other = _make_cache()
    other.open([1])
    with pytest.raises(ValueError, match="request 0 belongs to another cache"):
        other.close(request)


def test_bad_batches_are_refused():
    cache = _make_cache()
    request = cache.open([1, 2])
    with pytest.raises(ValueError, match="at least one request"):
        cache.plan([])
    for count in (0, -1, 3):
        with pytest.raises(ValueError, match=f"cannot be extended by {count} tokens"):
            cache.plan([(request, count)])
    with pytest.raises(ValueError, match="in the batch twice"):
        cache.plan([(request, 1), (request, 1)])
    with pytest.raises(ValueError, match="num_forks=0"):
        cache.fork(request, 0)
    assert request.num_pages == 0


def test_a_stale_plan_is_refused(forward):
    cache = _make_cache()
    first, second = cache.open([1, 2]), cache.open([3])
    old = cache.plan([(first, 2)])
    assert old is not None
    _run(cache, forward, [(second, 1)])
    with pytest.raises(jaxkv.StalePlanError, match="planned at version"):
        cache.commit(old, cache.pool)
    assert first.num_computed == 0


def test_a_pool_from_another_spec_is_refused():
    cache, other = _make_cache(), _make_cache(pages_per_shard=7)
    step = cache.plan([(cache.open([1]), 1)])
    assert step is not None
    with pytest.raises(ValueError, match="the pool is of"):
        cache.commit(step, other.pool)
    with pytest.raises(TypeError, match="expected a KVPool"):
        cache.commit(step, cache.pool.k)  # pyright: ignore[reportArgumentType]
    cache.commit(step, cache.pool)


def test_poison_refuses_a_cache_in_use():
    cache = _make_cache()
    cache.open([1])
    with pytest.raises(ValueError, match="has 1 open requests"):
        testing.poison(cache)


def test_new_tokens_must_be_whole():
    cache = _make_cache()
    request = cache.open([1, 2])
    with pytest.raises(TypeError, match="new tokens must be ints, got float64"):
        cache.plan([(request, 1.5)])
