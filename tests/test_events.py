"""KV events: what a router hears, and hashes that are alike everywhere."""

import dataclasses
import hashlib
import struct

import numpy as np
import pytest
from prefix_loop import Loop

import jaxkv.host.prefix_cache
from jaxkv.host.events import (
    DEVICE,
    CacheCleared,
    Event,
    PagesRemoved,
    PagesStored,
    page_hashes,
)
from jaxkv.host.namespace import Namespace
from jaxkv.host.prefix_cache import PrefixCache


def _tokens(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def _pages(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def _hash(parent: bytes, *tokens: int) -> bytes:
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}i", *tokens)).digest()


def _make_cache(num_shards: int = 1) -> tuple[PrefixCache, list[Event]]:
    events: list[Event] = []
    return PrefixCache(num_shards, 32, 2, sink=events.append), events


_ROOT = Namespace().digest()


def test_hashes_chain_over_parent_and_little_endian_tokens():
    first = _hash(_ROOT, 1, 2)
    second = _hash(first, 3, 2**31 - 1)
    tokens = _tokens(1, 2, 3, 2**31 - 1)
    assert page_hashes(tokens, 2, _ROOT) == [first, second]
    assert page_hashes(tokens.astype(">i4"), 2, _ROOT) == [first, second]
    assert page_hashes(_tokens(), 2, _ROOT) == []


def test_a_hash_does_not_change_from_one_version_to_the_next():
    assert page_hashes(_tokens(1, 2), 2, _ROOT)[0].hex()[:16] == "536d7708eb0b72dd"


def test_tokens_that_do_not_fill_pages_have_no_hashes():
    with pytest.raises(ValueError, match="3 tokens are no whole pages of page_size=2"):
        page_hashes(_tokens(1, 2, 3), 2, _ROOT)


def test_stored_pages_tell_their_parent_tokens_and_namespace():
    cache, events = _make_cache()
    space = Namespace(adapter_id="lora")
    cache.insert(_tokens(1, 2, 3, 4), _pages(1, 2), space)
    cache.insert(_tokens(1, 2, 3, 4, 5, 6), _pages(1, 2, 3), space)
    cache.insert(_tokens(1, 2, 7, 8), _pages(1, 4), space)
    first = _hash(space.digest(), 1, 2)
    second = _hash(first, 3, 4)
    assert events == [
        PagesStored(
            page_hashes=(first, second),
            parent_hash=None,
            token_ids=(1, 2, 3, 4),
            page_size=2,
            namespace=space,
            medium=DEVICE,
        ),
        PagesStored(
            page_hashes=(_hash(second, 5, 6),),
            parent_hash=second,
            token_ids=(5, 6),
            page_size=2,
            namespace=space,
        ),
        PagesStored(
            page_hashes=(_hash(first, 7, 8),),
            parent_hash=first,
            token_ids=(7, 8),
            page_size=2,
            namespace=space,
        ),
    ]


def test_what_adds_no_page_tells_nothing():
    cache, events = _make_cache(num_shards=2)
    cache.insert(_tokens(1, 2, 3, 4), _pages(2, 3))
    del events[:]
    cache.insert(_tokens(1, 2, 3, 4), _pages(2, 3))
    cache.insert(_tokens(1, 2, 3, 4), _pages(4, 5))
    assert cache.insert(_tokens(1, 2, 3, 4), _pages(5, 6)).declined
    cache.release(cache.lease(cache.match(_tokens(1, 2, 3))))
    assert cache.evict(np.zeros(2, int), np.zeros(2, int)) is not None
    assert cache.evict(np.full(2, 9), np.zeros(2, int)) is None
    assert events == []


def test_removed_pages_are_told_once_a_call_in_the_order_of_their_leaving():
    cache, events = _make_cache()
    cache.insert(_tokens(1, 2, 3, 4), _pages(1, 2))
    cache.insert(_tokens(1, 2, 7, 8, 9, 9), _pages(1, 3, 4))
    first = _hash(_ROOT, 1, 2)
    seventh = _hash(first, 7, 8)
    del events[:]
    evicted = cache.evict(np.array([3]), np.array([0]))
    assert evicted is not None
    assert evicted.tolist() == [2, 4, 3]
    assert events == [
        PagesRemoved(
            page_hashes=(_hash(first, 3, 4), _hash(seventh, 9, 9), seventh),
            medium=DEVICE,
        )
    ]


def test_a_listener_always_knows_what_is_cached():
    events: list[Event] = []
    loop = Loop(2, 6, page_size=2, sink=events.append)
    rng = np.random.default_rng(1)
    known: set[bytes] = set()
    num_removed = 0
    for _ in range(80):
        tokens = rng.integers(0, 2, rng.integers(1, 12)).astype(np.int32)
        request = loop.open(tokens.tolist())
        assert loop.compute(request, tokens.size - request.num_computed)
        loop.finish(request)
        for event in events:
            if isinstance(event, PagesStored):
                assert event.parent_hash is None or event.parent_hash in known
                assert not known & set(event.page_hashes)
                known |= set(event.page_hashes)
            elif isinstance(event, PagesRemoved):
                assert known >= set(event.page_hashes)
                known -= set(event.page_hashes)
                num_removed += len(event.page_hashes)
        del events[:]
        cached = [loop.pool[page][1] for page in loop.cache.pages().tolist()]
        expected = {page_hashes(_tokens(*written), 2, _ROOT)[-1] for written in cached}
        assert known == expected
    assert num_removed == loop.cache.stats().evicted_pages > 20


def test_clearing_is_told():
    cache, events = _make_cache()
    cache.insert(_tokens(1, 2), _pages(1))
    cache.clear()
    assert events[1:] == [CacheCleared(medium=DEVICE)]


def test_nothing_is_hashed_where_nobody_listens(monkeypatch):
    def fail(*_):
        raise AssertionError("hashed")

    monkeypatch.setattr(jaxkv.host.prefix_cache, "page_hashes", fail)
    monkeypatch.setattr(Namespace, "digest", fail)
    cache = PrefixCache(1, 8, 2)
    cache.insert(_tokens(1, 2, 3, 4), _pages(1, 2))
    cache.insert(_tokens(1, 2, 5, 6), _pages(1, 3))
    assert cache.evict(np.array([2]), np.array([0])) is not None
    cache.clear()


def test_a_listener_that_is_empty_is_one_all_the_same():
    class Log(list):
        __call__ = list.append

    log = Log()
    PrefixCache(1, 8, 2, sink=log).insert(_tokens(1, 2), _pages(1))
    assert len(log) == 1


def test_events_are_values():
    event = PagesRemoved(page_hashes=(b"a",))
    assert event == PagesRemoved(page_hashes=(b"a",))
    assert event != PagesRemoved(page_hashes=(b"a",), medium="host")
    assert hash(event) == hash(PagesRemoved(page_hashes=(b"a",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.medium = "host"  # pyright: ignore[reportAttributeAccessIssue]
