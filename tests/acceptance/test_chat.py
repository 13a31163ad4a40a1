"""A SmolLM2 chat of four turns computes each turn's new tokens, and the same answers.

The same conversation is held without prefixes to compare with: one compiled step, two
caches of one geometry.
"""

import argparse
import functools
import io
import json

import chat
import pytest
import serve
import weights

import jaxkv
from jaxkv import testing

SYSTEM = "You answer in one short sentence."
MESSAGES = [
    "What is the capital of France?",
    "And of Italy?",
    "Which has more people?",
    "Thank you!",
]
PAGE_SIZE, DEVICES, MAX_NEW_TOKENS = 4, 2, 7


@functools.cache
def _checkpoint():
    return weights.load("smollm2")


@functools.cache
def _server():
    args = argparse.Namespace(
        devices=DEVICES, page_size=PAGE_SIZE, context=160, chunk=27
    )
    return serve.serve_llama(_checkpoint(), args, max_sequences=1)


def _uncached_server():
    server = _server()
    cache = jaxkv.KVCache(
        server.cache.spec,
        server.cache.group.mesh,
        mode="striped",
        buckets=server.cache.buckets,
        keep_prefixes=False,
    )
    return serve.Server(cache, server._step, server._params)


def _talk(server):
    """The conversation's ids, and each turn with how many tokens it added."""
    conversation = chat.Chat(server, _checkpoint(), SYSTEM)
    turns = []
    for message in MESSAGES:
        before = len(conversation.tokens)
        turn = conversation.turn(message, MAX_NEW_TOKENS)
        turns.append((turn, len(conversation.tokens) - before))
    return conversation.tokens, turns


def test_four_turns_compute_only_what_is_new_and_answer_as_an_uncached_run():
    server = _server()
    server.cache.clear()
    with testing.no_compilation():
        tokens, turns = _talk(server)
        want, uncached = _talk(_uncached_server())
    assert tokens == want
    total = 0
    for (turn, num_new), (without, _) in zip(turns, uncached, strict=True):
        assert turn.text == without.text
        assert turn.computed <= num_new + PAGE_SIZE
        # its last token is known without being computed
        assert turn.reused + turn.computed == total + num_new - 1
        assert turn.reused > total - PAGE_SIZE - 1
        total += num_new
        assert sum(turn.pages_per_shard) == (total - 1) // PAGE_SIZE
        assert max(turn.pages_per_shard) - min(turn.pages_per_shard) <= 1
        assert without.reused == 0
        assert without.computed == total - 1
    assert "Paris" in turns[0][0].text
    assert "Rome" in turns[1][0].text


def test_the_conversation_is_what_the_template_renders():
    conversation = chat.Chat(_server(), _checkpoint(), SYSTEM)
    messages = [{"role": "system", "content": SYSTEM}]
    streamed = []
    for message, max_new_tokens in (("What is 1 + 1?", 2), ("Hi!", MAX_NEW_TOKENS)):
        messages.append({"role": "user", "content": message})
        turn = conversation.turn(message, max_new_tokens, streamed.append)
        assert "".join(streamed) == turn.text
        streamed.clear()
        messages.append({"role": "assistant", "content": turn.text})
    tokenizer = _checkpoint().tokenizer
    assert tokenizer.chat(messages).startswith(tokenizer.decode(conversation.tokens))


def test_lines_of_stdin_become_lines_of_json(monkeypatch, capsys):
    server = _server()
    server.cache.clear()
    monkeypatch.setattr(chat.serve, "serve_llama", lambda *args, **options: server)
    monkeypatch.setattr(chat.weights, "load", lambda name: _checkpoint())
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi!\n\nWho are you?\n"))
    chat.main(["--json", "--max-new-tokens=3", "--system", SYSTEM])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert list(first) == ["text", "reused", "computed", "pages_per_shard"]
    assert first["reused"] == 0
    assert second["reused"] >= first["computed"] - PAGE_SIZE
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi!\n"))
    chat.main(["--max-new-tokens=2", "--system", SYSTEM])
    assert "tokens reused" in capsys.readouterr().out


def test_a_conversation_that_is_too_long_says_so_and_stays_as_it_was():
    conversation = chat.Chat(_server(), _checkpoint(), SYSTEM)
    with pytest.raises(jaxkv.CapacityError, match="tokens exceed a request's 160"):
        conversation.turn("word " * 200, MAX_NEW_TOKENS)
    assert conversation.tokens == []
    assert _server().is_idle
