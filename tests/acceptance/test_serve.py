"""Continuous batching: every request's tokens are those of its dense run alone.

64 requests with shared system prompts and random tails arrive over many steps, on 8
simulated devices, for pools from roomy to so small that preemption and eviction never
stop. The oracle is the tiny decoder's dense double; the pages are counted by hand.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import serve
from tiny_decoder import VOCAB, TinyDecoder

import jaxkv
from jaxkv import testing

DECODER = TinyDecoder(num_layers=2)
PARAMS = {name: jnp.asarray(array) for name, array in DECODER.weights.items()}
SHARDS, PAGE_SIZE = 8, 4
ROOMY, TIGHT, TINY = 60, 5, 3  # pages a shard; the last holds one request of 64 tokens


def _forward(params, pool, plan):
    hidden, pool = DECODER.forward(params, pool, plan)
    return hidden @ params["embed"].T, pool


# tiny arrays: compiling them well costs more than running them
STEP = serve.make_step(_forward, {"xla_backend_optimization_level": 0})


@functools.cache
def _server(pages_per_shard=ROOMY):
    """One warm server a pool size; every test leaves it idle, with an empty cache."""
    cache = jaxkv.KVCache(
        DECODER.spec(page_size=PAGE_SIZE, pages_per_shard=pages_per_shard),
        testing.simulated_mesh(kv=SHARDS),
        mode="striped",
        buckets=jaxkv.Buckets(
            tokens=(6, 24) if pages_per_shard == ROOMY else (24,),
            sequences=(6,),
            table_widths=(2,),
            blocks=(1,),
        ),
    )
    testing.poison(cache)
    server = serve.Server(cache, STEP, PARAMS)
    server.warm_up()
    return server


def _make_requests(num_requests=64, seed=0):
    """(prompt, max_new_tokens) pairs over three system prompts."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, VOCAB, size) for size in (8, 18, 25)]
    requests = []
    for _ in range(num_requests):
        tail = rng.integers(0, VOCAB, rng.integers(1, 12))
        prompt = np.concatenate([systems[rng.integers(3)], tail])
        requests.append((prompt.tolist(), int(rng.integers(1, 16))))
    return requests


def _dense_logits(tokens):
    return DECODER.dense(tokens) @ DECODER.weights["embed"].T.astype(np.float64)


def _assert_greedy(prompt, new_ids):
    """By induction: each token is the dense argmax after all before it."""
    rows = _dense_logits([*prompt, *new_ids])[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(new_ids, rows.argmax(axis=-1))


def _assert_conserved(cache):
    """Free, cached and private pages are disjoint, and all there are."""
    allocator = cache._chains.allocator
    usable = np.arange(SHARDS, SHARDS * cache.spec.pages_per_shard)
    held = set(usable[allocator.holds(usable) > 0].tolist())
    cached = cache._chains.prefix_cache.pages().tolist()
    private = [
        page
        for request in cache.requests
        if request.lease is not None
        for page in request.pages()[request.lease.num_pages :].tolist()
    ]
    assert len(set(cached) | set(private)) == len(cached) + len(private)
    assert set(cached) | set(private) == held
    stats = cache.stats()
    for pages, counts in ((cached, stats.cached_pages), (private, stats.private_pages)):
        owners = np.array(pages, int) % SHARDS
        np.testing.assert_array_equal(np.bincount(owners, minlength=SHARDS), counts)
    total = stats.free_pages + stats.cached_pages + stats.private_pages
    assert total.tolist() == [cache.spec.usable_pages] * SHARDS


def _assert_all_returned(server):
    assert server.is_idle
    assert server.cache.requests == ()
    stats = server.cache.stats()
    assert not stats.private_pages.any()
    assert not stats.protected_pages.any()
    server.cache.clear()
    free = server.cache.stats().free_pages
    assert free.tolist() == [server.cache.spec.usable_pages] * SHARDS


def _serve(server, requests, *, steps_between=0, check=lambda cache: None):
    """New tokens of each request; each arrives some steps after the one before."""
    news = {}

    def on_token(request_id, token, finished):
        ids, ended = news[request_id]
        assert not ended
        news[request_id] = ([*ids, token], finished)

    waiting = list(requests)
    order = []
    while waiting or not server.is_idle:
        if waiting:
            prompt, max_new_tokens, *options = waiting.pop(0)
            sampling = options[0] if options else serve.GREEDY
            request_id = server.submit(
                prompt, max_new_tokens, sampling=sampling, on_token=on_token
            )
            news[request_id] = ([], False)
            order.append(request_id)
        for _ in range(steps_between if waiting else 1):
            server.step()
            check(server.cache)
    assert all(ended for _, ended in news.values())
    return [news[request_id][0] for request_id in order]


@pytest.mark.parametrize(
    ("pages_per_shard", "policy"),
    [
        (ROOMY, serve.longest_prefix),
        (TIGHT, serve.first_come),
        (TINY, serve.longest_prefix),
    ],
)
def test_64_requests_give_the_tokens_of_their_dense_runs(pages_per_shard, policy):
    server = _server(pages_per_shard)
    server.policy = policy
    before = server.cache.stats()
    requests = _make_requests()
    with testing.no_compilation():
        got = _serve(server, requests, steps_between=1, check=_assert_conserved)
    for (prompt, max_new_tokens), new_ids in zip(requests, got, strict=True):
        assert len(new_ids) == max_new_tokens
        _assert_greedy(prompt, new_ids)
    after = server.cache.stats()
    assert after.hit_tokens - before.hit_tokens > 1000
    evicted = after.evicted_tokens - before.evicted_tokens
    preemptions = after.preemptions - before.preemptions
    if pages_per_shard == ROOMY:
        assert evicted == preemptions == 0
    else:
        assert evicted > 800
        assert preemptions > len(requests)
    _assert_all_returned(server)


def test_a_burst_is_served_too_and_later_prompts_reuse_the_first():
    server = _server()
    before = server.cache.stats().hit_tokens
    requests = _make_requests(20, seed=1)
    got = _serve(server, requests, check=_assert_conserved)
    for (prompt, _), new_ids in zip(requests, got, strict=True):
        _assert_greedy(prompt, new_ids)
    assert server.cache.stats().hit_tokens > before
    _assert_all_returned(server)


def test_a_seed_gives_the_same_tokens_in_any_batch():
    server = _server()
    samplings = [
        serve.Sampling(temperature=9.0, seed=seed, top_k=top_k, top_p=top_p)
        for seed, top_k, top_p in ((1, 0, 1.0), (2, 20, 1.0), (3, 0, 0.9), (1, 9, 0.8))
    ]
    prompt = [7, 3, 9]
    requests = [(prompt, 12, sampling) for sampling in samplings]
    with testing.no_compilation():
        alone = [_serve(server, [request])[0] for request in requests]
        crowd = _make_requests(6, seed=2)
        together = _serve(server, [*crowd[:3], *requests, *crowd[3:]], steps_between=1)
    assert together[3:7] == alone
    assert len({tuple(ids) for ids in alone}) == 4
    # a small pool preempts them, and computes their tokens again
    small = _server(TINY)
    got = _serve(small, [*requests, *_make_requests(8, seed=5)])[:4]
    assert small.cache.stats().preemptions > 0
    assert got == alone


def test_sampling_keeps_to_top_k_and_top_p():
    server = _server()
    prompt, length = [4, 4, 8, 1], 24
    greedy, one, tiny_p, few, nucleus, free = _serve(
        server,
        [
            (prompt, length),
            (prompt, length, serve.Sampling(temperature=2.0, top_k=1, seed=5)),
            (prompt, length, serve.Sampling(temperature=2.0, top_p=1e-6, seed=5)),
            (prompt, length, serve.Sampling(temperature=9.0, top_k=3, seed=5)),
            (prompt, length, serve.Sampling(temperature=9.0, top_p=0.3, seed=5)),
            (prompt, length, serve.Sampling(temperature=9.0, seed=5)),
        ],
    )
    _assert_greedy(prompt, greedy)
    assert one == tiny_p == greedy

    def ranks_and_masses(new_ids):
        """Tokens likelier than each one, and their probability at temperature 9."""
        rows = _dense_logits([*prompt, *new_ids])[len(prompt) - 1 : -1] / 9.0
        probabilities = np.exp(rows - rows.max(axis=-1, keepdims=True))
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        own = probabilities[np.arange(len(new_ids)), new_ids][:, None]
        likelier = probabilities > own
        return likelier.sum(axis=-1), (probabilities * likelier).sum(axis=-1)

    ranks, _ = ranks_and_masses(few)
    assert set(ranks.tolist()) == {0, 1, 2}
    _, masses = ranks_and_masses(nucleus)
    assert 0 < masses.max() < 0.3
    ranks, masses = ranks_and_masses(free)
    assert ranks.max() > 10
    assert masses.max() > 0.5


def test_draws_have_the_distribution_of_the_logits():
    num_draws = 4000
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    rows = jnp.broadcast_to(logits[None], (num_draws, 4))
    sampling = serve.Sampling(
        temperature=np.ones(num_draws, np.float32),
        top_k=np.zeros(num_draws, np.int32),
        top_p=np.ones(num_draws, np.float32),
        seed=np.arange(num_draws, dtype=np.uint32),
    )
    tokens = serve.sample(rows, sampling, jnp.full(num_draws, 17))
    shares = np.bincount(np.asarray(tokens), minlength=4) / num_draws
    np.testing.assert_allclose(shares, np.exp(logits), atol=0.03)


def test_a_stop_token_is_the_last():
    server = _server()
    prompt = [1, 2, 3]
    (whole,) = _serve(server, [(prompt, 12)])
    stop = whole[4]
    seen = []
    server.submit(
        prompt,
        12,
        stop_ids=[stop],
        on_token=lambda *event: seen.append(event),
    )
    server.run()
    first = whole.index(stop)
    assert [token for _, token, _ in seen] == whole[: first + 1]
    assert [finished for *_, finished in seen] == [False] * first + [True]


def test_callbacks_come_in_order_and_may_submit():
    server = _server()
    events = []

    def on_token(request_id, token, finished):
        events.append((request_id, finished))
        if finished and len(events) < 12:
            server.submit([9, 9], 2, on_token=on_token)

    first = server.submit([5] * 30, 3, on_token=on_token)
    second = server.submit([6] * 3, 5, on_token=on_token)
    server.run()
    by_request = {}
    for request_id, finished in events:
        by_request.setdefault(request_id, []).append(finished)
    assert by_request[first] == [False, False, True]
    assert by_request[second] == [False] * 4 + [True]
    assert len(by_request) > 2
    assert all(ended == [False, True] for ended in list(by_request.values())[2:])


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "preempted"])
def test_an_abort_at_any_time_returns_all_pages(when):
    server = _server(TINY) if when == "preempted" else _server()
    seen = []
    options = {"on_token": lambda *event: seen.append(event)}
    # short prompts are all admitted, and outgrow the tiny pool together
    size, length = (6, 26) if when == "preempted" else (20, 12)
    others = [server.submit([index] * size, length, **options) for index in range(2)]
    target = server.submit([40] * (size + 10), length, **options)
    job = next(job for job in server.waiting if job.id == target)
    reached = {
        "waiting": lambda: job in server.waiting,
        "prefill": lambda: job in server.running and not job.num_new,
        "decode": lambda: job in server.running and job.num_new > 2,
        "preempted": lambda: job in server.preempted,
    }[when]
    while not reached():
        assert not server.is_idle
        server.step()
        _assert_conserved(server.cache)
    before = [event for event in seen if event[0] == target]
    assert server.abort(target)
    assert not server.abort(target)
    _assert_conserved(server.cache)
    server.run()
    assert [event for event in seen if event[0] == target] == before
    for index, other in enumerate(others):
        ids = [token for request_id, token, _ in seen if request_id == other]
        assert len(ids) == length
        _assert_greedy([index] * size, ids)
    _assert_all_returned(server)


def test_a_callback_may_abort_another_request_of_the_same_step():
    server = _server()
    seen = []
    ids = []

    def on_token(request_id, token, finished):
        seen.append(request_id)
        server.abort(ids[1])

    ids += [server.submit([3, 4], 4, on_token=on_token) for _ in range(2)]
    server.run()
    assert seen == [ids[0]] * 4
    _assert_all_returned(server)


def test_the_token_budget_bounds_every_step():
    cache = _server().cache
    server = serve.Server(cache, STEP, PARAMS, token_budget=5)
    for prompt, max_new_tokens in _make_requests(8, seed=3):
        server.submit(prompt, max_new_tokens)
    mixed = 0
    while not server.is_idle:
        decoding = sum(job.request.num_uncomputed == 1 for job in server.running)
        before = cache.stats().computed_tokens
        server.step()
        computed = cache.stats().computed_tokens - before
        assert 1 <= computed <= 5
        assert computed >= decoding  # nobody who decodes has to wait
        mixed += decoding < computed and decoding > 0
    assert mixed
    _assert_all_returned(server)


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "sampling", "message"),
    [
        ([], 1, {}, r"len\(prompt\)=0"),
        ([1], 0, {}, "max_new_tokens=0"),
        ([1], 1, {"temperature": -1.0}, "temperature=-1.0"),
        ([1], 1, {"temperature": float("nan")}, "temperature=nan"),
        ([1], 1, {"top_k": -1}, "top_k=-1"),
        ([1], 1, {"top_p": 0.0}, "top_p=0.0"),
        ([1], 1, {"seed": 2**32}, "seed=4294967296"),
        ([1] * 60, 6, {}, "total=65 tokens exceed a request's 64"),
    ],
)
def test_bad_requests_are_refused_at_submit(prompt, max_new_tokens, sampling, message):
    server = _server()
    with pytest.raises(ValueError, match=message):
        server.submit(prompt, max_new_tokens, sampling=serve.Sampling(**sampling))
    assert server.is_idle


def test_a_line_that_is_no_request_is_named(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a", "seed": 3}\n{"prompt": "b", "max_new_tokens": 2}')
    assert list(serve.read_requests(path, 9)) == [
        ("a", 9, serve.Sampling(seed=3)),
        ("b", 2, serve.GREEDY),
    ]
    for bad in ("{", "[1]", "3", "{}", '{"prompt": "a", "sed": 1}'):
        path.write_text('{"prompt": "a"}\n' + bad)
        with pytest.raises(ValueError, match="jsonl:2: "):
            list(serve.read_requests(path, 9))
