"""The request table against Python lists: slots, chains, tokens and the next token."""

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxkv.errors import ClosedRequestError
from jaxkv.host.request import Request, RequestTable


def _make_tokens(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def _make_table(num_shards: int = 4, page_size: int = 2) -> RequestTable:
    return RequestTable(num_shards, page_size)


def _make_chain(num_pages: int, base: int, num_shards: int = 4) -> np.ndarray:
    """Distinct logical pages whose owners go round from `base`."""
    pages = [
        num_shards * (num_pages - index + 1) + (base + index) % num_shards
        for index in range(num_pages)
    ]
    return np.array(pages, np.int32)


def test_a_new_request_has_its_tokens_and_no_chain():
    table = _make_table()
    request = table.open(_make_tokens(7, 8, 9))
    assert request.id == 0
    assert not request.is_closed
    assert request.tokens.tolist() == [7, 8, 9]
    assert request.tokens.dtype == np.int32
    assert (request.num_tokens, request.num_computed, request.num_pages) == (3, 0, 0)
    assert request.num_uncomputed == 3
    assert request.base == -1
    assert request.pages().tolist() == []
    assert table.next_token[request.slot] == 7
    assert list(table.requests.values()) == [request]


def test_tokens_are_read_only_and_not_the_callers():
    table = _make_table()
    given = _make_tokens(7, 8)
    request = table.open(given)
    given[:] = 0
    assert request.tokens.tolist() == [7, 8]
    with pytest.raises(ValueError, match="read-only"):
        request.tokens[0] = 1
    before = request.tokens
    table.append(request, _make_tokens(*range(100)))
    assert before.tolist() == [7, 8]
    assert request.tokens.tolist() == [7, 8, *range(100)]


def test_repr_names_the_state():
    table = _make_table()
    request = table.open(_make_tokens(7, 8, 9))
    table.extend_chain(request, _make_chain(2, 3))
    table.advance([request], np.array([2]))
    assert repr(request) == ("Request(id=0, num_tokens=3, num_computed=2, num_pages=2)")
    table.close(request)
    assert repr(request) == "Request(id=0, closed)"


def test_the_table_grows_and_keeps_what_it_holds():
    table = _make_table(num_shards=3)
    requests = []
    for number in range(40):
        request = table.open(_make_tokens(number, number + 1))
        table.extend_chain(request, _make_chain(number % 9, number % 3, 3))
        table.advance([request], np.array([number % 2]))
        requests.append(request)
    assert len({request.slot for request in requests}) == 40
    for number, request in enumerate(requests):
        assert request.id == number
        assert request.tokens.tolist() == [number, number + 1]
        assert request.num_computed == number % 2
        assert request.pages().tolist() == (
            _make_chain(number % 9, number % 3, 3).tolist()
        )
        assert table.next_token[request.slot] == number + number % 2
    for name in ("num_tokens", "num_computed", "num_pages", "base", "next_token"):
        assert getattr(table, name).dtype == np.int32


def test_a_closed_slot_is_reused_and_zeroed():
    table = _make_table()
    kept, closed = table.open(_make_tokens(1)), table.open(_make_tokens(2, 3, 4))
    table.extend_chain(kept, _make_chain(1, 0))
    table.extend_chain(closed, _make_chain(7, 1))
    table.advance([closed], np.array([3]))
    slot = closed.slot
    table.close(closed)
    assert closed.is_closed
    assert not table.stripes[:, slot].any()
    assert list(table.requests.values()) == [kept]
    again = table.open(_make_tokens(5, 6))
    assert again.slot == slot
    assert again.id == 2
    assert (again.num_computed, again.num_pages, again.base) == (0, 0, -1)
    assert table.next_token[slot] == 5
    table.extend_chain(again, _make_chain(2, 3))
    assert again.base == 3
    assert again.pages().tolist() == _make_chain(2, 3).tolist()
    assert kept.pages().tolist() == _make_chain(1, 0).tolist()


@pytest.mark.parametrize(
    "use",
    [
        lambda table, request: table.close(request),
        lambda table, request: table.append(request, _make_tokens(1)),
        lambda table, request: table.extend_chain(request, _make_chain(1, 0)),
        lambda table, request: table.drop_chain(request),
        lambda table, request: table.repoint_chain(request, _make_chain(1, 0)),
        lambda table, request: request.pages(),
        lambda table, request: request.tokens,
        lambda table, request: request.num_tokens,
        lambda table, request: request.num_computed,
        lambda table, request: request.num_uncomputed,
        lambda table, request: request.num_pages,
        lambda table, request: request.base,
    ],
)
def test_a_closed_request_is_refused_and_changes_nothing(use):
    table = _make_table()
    others = [table.open(_make_tokens(number)) for number in range(8)]
    closed = others.pop(3)
    table.close(closed)
    names = ("num_tokens", "num_computed", "num_pages", "base", "next_token", "stripes")
    before = {name: getattr(table, name).copy() for name in names}
    with pytest.raises(ClosedRequestError, match="request 3 is closed"):
        use(table, closed)
    for name in names:
        np.testing.assert_array_equal(getattr(table, name), before[name])
    assert table.open(_make_tokens(9)).slot == 3


def test_a_chain_is_stored_as_each_owners_stripe():
    table = _make_table()
    request = table.open(_make_tokens(1))
    table.extend_chain(request, np.array([7, 4, 9, 14, 3 + 4 * 5]))
    assert request.base == 3
    stripes = table.stripes[:, request.slot]
    assert [stripe[stripe > 0].tolist() for stripe in stripes] == [
        [1],
        [2],
        [3],
        [1, 5],
    ]
    assert request.pages().tolist() == [7, 4, 9, 14, 23]
    assert request.pages().dtype == np.int32
    assert table.chain(request.slot, 3).tolist() == [7, 4, 9]
    assert table.chain(request.slot, 0).tolist() == []


@pytest.mark.parametrize("base", range(4))
def test_a_chain_grows_by_any_stretches(base):
    chain = _make_chain(23, base)
    for first in range(24):
        for second in range(first, 24, 5):
            table = _make_table()
            request = table.open(_make_tokens(1))
            for stretch in (chain[:first], chain[first:second], chain[second:]):
                table.extend_chain(request, stretch)
            assert request.base == base
            assert request.pages().tolist() == chain.tolist()


@pytest.mark.parametrize(
    ("held", "pages", "message"),
    [
        ([], [4, 6], r"page 6 cannot be page 1 .*base=0: its owner is 2, not 1"),
        ([], [7, 4, 4], r"page 4 cannot be page 2 .*base=3: its owner is 0, not 1"),
        ([7, 4], [6], r"page 6 cannot be page 2 .*base=3: its owner is 2, not 1"),
        ([7, 4], [5, 10, 12], r"page 12 cannot be page 4 .*its owner is 0, not 3"),
        ([7, 4], [7, 4], r"page 7 cannot be page 2 .*its owner is 3, not 1"),
    ],
)
def test_owners_that_are_not_cyclic_are_refused_and_change_nothing(
    held, pages, message
):
    table = _make_table()
    request = table.open(_make_tokens(1))
    table.extend_chain(request, np.array(held, np.int32))
    base, stripes = request.base, table.stripes.copy()
    with pytest.raises(ValueError, match=message):
        table.extend_chain(request, np.array(pages, np.int32))
    assert request.pages().tolist() == held
    assert request.base == base
    np.testing.assert_array_equal(table.stripes, stripes)


def test_one_shard_takes_any_pages():
    table = _make_table(num_shards=1)
    request = table.open(_make_tokens(1))
    table.extend_chain(request, np.array([9, 3, 7]))
    assert request.base == 0
    assert request.pages().tolist() == [9, 3, 7]


def test_next_token_follows_advance_and_append():
    table = _make_table()
    request = table.open(_make_tokens(1, 2, 3))
    table.advance([request], np.array([2]))
    assert table.next_token[request.slot] == 3
    table.append(request, _make_tokens(4, 5))
    assert table.next_token[request.slot] == 3
    table.advance([request], np.array([3]))
    assert request.num_uncomputed == 0
    table.append(request, _make_tokens())
    table.append(request, _make_tokens(6, 7))
    assert table.next_token[request.slot] == 6
    table.advance([request], np.array([1]))
    assert table.next_token[request.slot] == 7


def test_advance_takes_a_count_for_each_request():
    table = _make_table()
    requests = [table.open(_make_tokens(*range(9))) for _ in range(3)]
    table.advance(requests, np.array([1, 0, 9]))
    assert [request.num_computed for request in requests] == [1, 0, 9]
    with pytest.raises(ValueError, match="3 requests, but 2 counts"):
        table.advance(requests, np.array([1, 1]))


def test_a_dropped_chain_leaves_the_tokens_to_be_computed_again():
    table = _make_table()
    kept, request = table.open(_make_tokens(1)), table.open(_make_tokens(2, 3, 4))
    table.extend_chain(kept, _make_chain(1, 0))
    table.extend_chain(request, _make_chain(7, 1))
    table.advance([request], np.array([2]))
    table.drop_chain(request)
    assert (request.num_computed, request.num_pages, request.base) == (0, 0, -1)
    assert request.tokens.tolist() == [2, 3, 4]
    assert table.next_token[request.slot] == 2
    assert not table.stripes[:, request.slot].any()
    table.extend_chain(request, _make_chain(2, 3))
    assert request.base == 3
    assert kept.pages().tolist() == _make_chain(1, 0).tolist()


@pytest.mark.parametrize("num_pages", [0, 1, 4, 6, 7])
def test_a_chains_first_pages_are_re_pointed_at_pages_of_the_same_owners(num_pages):
    table = _make_table()
    request = table.open(_make_tokens(1))
    chain = _make_chain(7, 3)
    table.extend_chain(request, chain)
    others = chain[:num_pages] + 4 * 50
    table.repoint_chain(request, others)
    assert request.pages().tolist() == [*others, *chain[num_pages:]]
    assert (request.num_pages, request.base) == (7, 3)


@pytest.mark.parametrize(
    "pages", [[7, 4, 10], [4], [7, 4, 9, 14], [7, 4, 9, 14, 19, *range(20, 40)]]
)
def test_pages_that_a_chain_cannot_be_re_pointed_at_change_nothing(pages):
    table = _make_table()
    request = table.open(_make_tokens(1))
    table.extend_chain(request, np.array([7, 4, 9]))
    with pytest.raises(ValueError, match=r"a chain of 3 pages .* re-pointed"):
        table.repoint_chain(request, np.array(pages))
    assert request.pages().tolist() == [7, 4, 9]


def test_pages_needed():
    table = _make_table(page_size=4)
    needed = table.pages_needed(np.array([0, 1, 4, 5, 8, 9]))
    assert needed.tolist() == [0, 1, 1, 2, 2, 3]


@dataclasses.dataclass
class _Model:
    tokens: list[int]
    computed: int
    pages: list[int]


class TableMachine(RuleBasedStateMachine):
    """The table beside one Python record a request."""

    def __init__(self):
        super().__init__()
        self.open_requests: list[tuple[Request, _Model]] = []

    @initialize(num_shards=st.integers(1, 4), page_size=st.integers(1, 3))
    def start(self, num_shards, page_size):
        self.table = _make_table(num_shards, page_size)

    @rule(tokens=st.lists(st.integers(0, 99), min_size=1, max_size=40))
    def open(self, tokens):
        request = self.table.open(_make_tokens(*tokens))
        self.open_requests.append((request, _Model(tokens, 0, [])))

    def _pick(self, data) -> tuple[Request, _Model]:
        return data.draw(st.sampled_from(self.open_requests))

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 99), max_size=50))
    def append(self, data, tokens):
        request, model = self._pick(data)
        self.table.append(request, _make_tokens(*tokens))
        model.tokens = model.tokens + tokens

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data())
    def advance(self, data):
        request, model = self._pick(data)
        count = data.draw(st.integers(0, len(model.tokens) - model.computed))
        self.table.advance([request], np.array([count], np.int32))
        model.computed += count

    @precondition(lambda self: self.open_requests)
    @rule(
        data=st.data(),
        first_owner=st.integers(0, 3),
        stored=st.lists(st.integers(1, 99), max_size=9),
    )
    def extend_chain(self, data, first_owner, stored):
        request, model = self._pick(data)
        num_shards = self.table.num_shards
        if model.pages:
            first_owner = model.pages[-1] + 1
        pages = [
            page * num_shards + (first_owner + index) % num_shards
            for index, page in enumerate(stored)
        ]
        self.table.extend_chain(request, np.array(pages, np.int32))
        model.pages += pages

    @precondition(lambda self: self.open_requests and self.table.num_shards > 1)
    @rule(data=st.data(), shift=st.integers(1, 3))
    def refuse(self, data, shift):
        request, model = self._pick(data)
        num_shards = self.table.num_shards
        owner = model.pages[-1] + 1 if model.pages else 0
        wrong = owner + 2 + shift % (num_shards - 1)
        pages = [
            4 * num_shards + owner % num_shards,
            5 * num_shards + wrong % num_shards,
        ]
        with pytest.raises(ValueError, match="cannot be page"):
            self.table.extend_chain(request, np.array(pages, np.int32))

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data(), shift=st.integers(100, 199))
    def repoint_chain(self, data, shift):
        request, model = self._pick(data)
        size = data.draw(st.integers(0, len(model.pages)))
        pages = [page + shift * self.table.num_shards for page in model.pages[:size]]
        self.table.repoint_chain(request, np.array(pages, np.int32))
        model.pages[:size] = pages

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data())
    def drop_chain(self, data):
        request, model = self._pick(data)
        self.table.drop_chain(request)
        model.computed, model.pages = 0, []

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data())
    def close(self, data):
        request, model = self._pick(data)
        self.table.close(request)
        self.open_requests.remove((request, model))

    @invariant()
    def agrees_with_the_model(self):
        if not self.open_requests:
            return
        slots = [request.slot for request, _ in self.open_requests]
        assert len(set(slots)) == len(slots)
        for request, model in self.open_requests:
            assert request.tokens.tolist() == model.tokens
            assert request.num_tokens == len(model.tokens)
            assert request.num_computed == model.computed
            assert request.pages().tolist() == model.pages
            assert request.num_pages == len(model.pages)
            if model.pages:
                assert request.base == model.pages[0] % self.table.num_shards
            if model.computed < len(model.tokens):
                next_token = self.table.next_token[request.slot]
                assert next_token == model.tokens[model.computed]
        assert list(self.table.requests.values()) == [
            request for request, _ in self.open_requests
        ]


TableMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=25, deadline=None
)
TestTableMachine = TableMachine.TestCase
