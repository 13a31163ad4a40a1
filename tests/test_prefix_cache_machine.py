"""The prefix cache under every mixture of requests that hypothesis can think of."""

import copy
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from prefix_loop import Loop, LoopRequest

from jaxkv.errors import PageAccountingError
from jaxkv.host.eviction import POLICIES
from jaxkv.host.namespace import Namespace

_NAMESPACES = (Namespace(), Namespace(salt="tenant"))
_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=21)


class PrefixCacheMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        num_shards=st.integers(1, 4),
        usable=st.integers(3, 9),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(self, num_shards: int, usable: int, policy: str):
        self.loop = Loop(num_shards, usable, page_size=2, policy=POLICIES[policy])

    @rule(target=requests, tokens=_TOKENS, namespace=st.sampled_from(_NAMESPACES))
    def open(self, tokens: list[int], namespace: Namespace):
        expected = self.loop.longest_cached(tokens, namespace)
        request = self.loop.open(tokens, namespace)
        assert request.lease.num_pages == request.pages.size == expected
        return request

    @rule(request=requests, data=st.data())
    def compute(self, request: LoopRequest, data: st.DataObject):
        left = len(request.tokens) - request.num_computed
        if not left:
            return
        cached = self.loop.cache.pages().tolist()
        evictable = self.loop.cache.evictable_per_owner()
        count = data.draw(st.integers(1, left))
        if not self.loop.compute(request, count) and not evictable.any():
            assert self.loop.cache.pages().tolist() == cached

    @rule(request=requests, token=st.integers(0, 1))
    def append(self, request: LoopRequest, token: int):
        request.tokens.append(token)

    @rule(request=requests)
    def insert_unfinished(self, request: LoopRequest):
        own = request.pages.copy()
        insertion = self.loop.insert(request)
        if insertion.declined:
            assert request.pages.tolist() == own.tolist()
        else:
            count = request.num_computed // self.loop.page_size
            assert request.lease.num_pages == count

    @rule(target=requests, request=requests)
    def fork(self, request: LoopRequest):
        if len(self.loop.requests) > 6:
            return multiple()
        return self.loop.fork(request)

    @rule(request=consumes(requests))
    def finish(self, request: LoopRequest):
        self.loop.finish(request)
        with pytest.raises(PageAccountingError):
            self.loop.cache.release(request.lease)

    @rule(request=consumes(requests))
    def abort(self, request: LoopRequest):
        self.loop.abort(request)

    @rule(data=st.data())
    def evict(self, data: st.DataObject):
        cache, allocator = self.loop.cache, self.loop.allocator
        free = allocator.free_per_owner()
        wanted = np.array([data.draw(st.integers(0, int(count) + 4)) for count in free])
        short = np.maximum(wanted - free, 0)
        evictable = cache.evictable_per_owner()
        before = set(cache.pages().tolist())
        protected = cache.stats().protected_pages.tolist()
        evicted = cache.evict(wanted, free)
        after = set(cache.pages().tolist())
        assert cache.stats().protected_pages.tolist() == protected
        if evicted is None:
            assert (short > evictable).any()
            assert after == before
            return
        assert len(set(evicted.tolist())) == evicted.size
        assert after == before - set(evicted.tolist())
        assert len(before) == len(after) + evicted.size
        taken = np.bincount(evicted % self.loop.num_shards, minlength=short.size)
        assert (taken >= short).all()
        if evicted.size:
            # it ended with the page that was needed last
            last = int(evicted[-1]) % self.loop.num_shards
            assert taken[last] == short[last] > 0
        else:
            assert not short.any()
        allocator.free(evicted)

    @rule()
    def clear(self):
        cache = self.loop.cache
        if cache.stats().protected_pages.any():
            before = cache.pages().tolist()
            with pytest.raises(PageAccountingError, match="pages are leased"):
                cache.clear()
            assert cache.pages().tolist() == before
        else:
            self.loop.allocator.free(cache.clear())
            assert not cache.pages().size

    @invariant()
    def holds(self):
        if hasattr(self, "loop"):
            self.loop.check()

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        for request in list(self.loop.requests):
            self.loop.finish(request)
        self.loop.allocator.free(self.loop.cache.clear())
        free = self.loop.allocator.free_per_owner()
        assert (free == self.loop.allocator.pages_per_shard - 1).all()


PrefixCacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
test_machine = PrefixCacheMachine.TestCase


class _PageLRU:
    """Least recently used by single pages of one shard: a dict of prefixes."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.used: dict[tuple[int, ...], int] = {}
        self.clock = 0

    def prefixes(self, tokens: list[int], num_pages: int) -> list[tuple[int, ...]]:
        ends = [(index + 1) * self.page_size for index in range(num_pages)]
        return [tuple(tokens[:end]) for end in ends]

    def match(self, tokens: list[int]) -> list[tuple[int, ...]]:
        found = []
        for prefix in self.prefixes(tokens, (len(tokens) - 1) // self.page_size):
            if prefix not in self.used:
                break
            found.append(prefix)
        return found

    def use(self, prefixes: list[tuple[int, ...]]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.used[prefix] = self.clock

    def evict(self, leased: set[tuple[int, ...]]) -> tuple[int, ...]:
        parents = {prefix[: -self.page_size] for prefix in self.used} | leased
        leaves = [prefix for prefix in self.used if prefix not in parents]
        victim = min(leaves, key=lambda prefix: self.used[prefix])
        del self.used[victim]
        return victim


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(_TOKENS, st.booleans(), st.integers(0, 5)), min_size=3, max_size=25
    )
)
def test_one_shard_evicts_exactly_what_a_page_by_page_lru_does(steps):
    loop = Loop(1, 400, page_size=2)
    model = _PageLRU(2)
    kept = None
    for tokens, keep, num_evicted in steps:
        hit = model.match(tokens)
        request = loop.open(tokens)
        model.use(hit)
        assert request.lease.num_pages == len(hit)
        assert loop.compute(request, len(tokens) - request.num_computed)
        loop.insert(request)
        inserted = model.prefixes(tokens, len(tokens) // 2)
        if inserted:
            model.use(inserted)
        if keep and kept is None:
            kept = request
        else:
            loop.abort(request)
        leased = set(model.prefixes(kept.tokens, len(kept.tokens) // 2) if kept else ())
        count = min(num_evicted, int(loop.cache.evictable_per_owner().sum()))
        free = loop.allocator.free_per_owner()
        evicted = loop.cache.evict(free + count, free)
        assert evicted is not None
        expected = [model.evict(leased) for _ in range(count)]
        assert [loop.pool[page][1] for page in evicted.tolist()] == expected
        loop.allocator.free(evicted)
        loop.check()


def _stream_digest() -> str:
    """A digest of all decisions over a fixed stream of requests."""
    rng = np.random.default_rng(7)
    digest = hashlib.sha256()
    loop = Loop(
        3, 8, page_size=2, sink=lambda event: digest.update(repr(event).encode())
    )
    for _ in range(400):
        choice = rng.integers(5)
        open_requests = len(loop.requests)
        if choice == 0 or not open_requests:
            tokens = rng.integers(0, 2, rng.integers(1, 20)).tolist()
            namespace = Namespace(adapter_id=str(rng.integers(2)))
            digest.update(loop.open(tokens, namespace).pages.tobytes())
            continue
        request = loop.requests[rng.integers(open_requests)]
        if choice == 1:
            loop.compute(request, min(4, len(request.tokens) - request.num_computed))
            digest.update(request.pages.tobytes())
        elif choice == 2:
            digest.update(b"".join(map(bytes, loop.insert(request)[:3])))
        elif choice == 3:
            loop.finish(request)
        else:
            loop.abort(request)
        digest.update(repr(loop.cache.stats()).encode())
    return digest.hexdigest()


def test_two_processes_decide_alike_whatever_their_hash_seed():
    digests = []
    for seed in ("0", "4321"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = "import test_prefix_cache_machine as t; print(t._stream_digest())"
        result = subprocess.run(
            [sys.executable, "-c", command],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(result.stdout.strip())
    assert digests[0] == digests[1] == _stream_digest()


def test_a_deep_copy_decides_alike():
    loop = Loop(2, 6, page_size=2)
    for tokens in ([1] * 9, [1] * 4 + [0] * 5, [0] * 7):
        request = loop.open(tokens)
        assert loop.compute(request, len(tokens) - request.num_computed)
        loop.finish(request)
    other = copy.deepcopy(loop)
    wanted = np.full(2, 6)
    both = [
        twin.cache.evict(wanted, twin.allocator.free_per_owner())
        for twin in (loop, other)
    ]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].tolist() == both[1].tolist()
