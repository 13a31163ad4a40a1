"""The trace replay against a page-by-page LRU, and its command line."""

import collections
import json
from pathlib import Path

import numpy as np
import pytest
import replay_trace
from replay_trace import TraceError

_TRACE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"


def _read() -> list[np.ndarray]:
    with _TRACE.open() as lines:
        return replay_trace.read_trace(lines)[0]


def _run(capsys, *arguments: str) -> dict:
    replay_trace.main([str(_TRACE), "--json", *arguments])
    captured = capsys.readouterr()
    assert "replay" in captured.err
    return json.loads(captured.out)


def _blocks_hit(requests: list[np.ndarray], capacity: int) -> int:
    """Blocks that a plain LRU of one whole pool hits; ends of chains leave first."""
    used: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = 0
    for block_ids in requests:
        blocks = block_ids.tolist()
        found = 0
        while found < len(blocks) - 1 and blocks[found] in used:
            found += 1
        hits += found
        kept = blocks[: min(len(blocks), capacity)]
        # the last block is always computed anew, even where it is cached already
        known = found + (len(kept) > found and kept[-1] in used)
        for block in reversed(blocks[:found]):
            used.move_to_end(block)
        while len(used) + len(kept) - known > capacity:
            used.popitem(last=False)
        for block in reversed(kept):
            used[block] = None
            used.move_to_end(block)
    return hits


@pytest.mark.parametrize("capacity", [40, 200, 1000, 3000, None])
def test_one_shard_hits_what_a_plain_lru_hits(capacity):
    requests = _read()
    result = replay_trace.replay(requests, num_shards=1, pages_per_shard=capacity)
    assert result.hit_tokens == 512 * _blocks_hit(requests, capacity or 10**6)
    assert result.declines == 0


@pytest.mark.parametrize("blocks", [400, 1600, 4000])
def test_eight_shards_hit_about_what_one_pool_of_all_their_pages_hits(blocks):
    requests = _read()
    result = replay_trace.replay(requests, num_shards=8, pages_per_shard=blocks // 8)
    asked = sum(block_ids.size for block_ids in requests)
    assert result.total_prefix_tokens == 512 * asked
    assert abs(result.hit_rate - _blocks_hit(requests, blocks) / asked) < 0.01


def test_smaller_pages_hit_the_same_blocks_where_nothing_is_evicted():
    requests = _read()[:60]
    whole = replay_trace.replay(requests)
    for page_size in (256, 64):
        parts = replay_trace.replay(requests, page_size=page_size)
        assert parts.total_prefix_tokens == whole.total_prefix_tokens
        # a prompt seen before may be found up to its last token, but not to that
        extra = parts.hit_tokens - whole.hit_tokens
        assert 0 <= extra <= len(requests) * (512 - page_size)
        assert parts.evictions == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_all_pages_are_accounted_for_at_every_request(policy):
    replayer = replay_trace.Replayer(4, 20, 256, policy)
    for block_ids in _read()[:80]:
        replayer.serve(replay_trace.prompt_tokens(block_ids))
        stats = replayer.cache.stats()
        assert not stats.protected_pages.any()
        free = replayer.allocator.free_per_owner()
        assert (free + stats.cached_pages == 20).all()


def test_a_request_larger_than_the_pool_keeps_what_fits():
    long = np.arange(40)
    result = replay_trace.replay(
        [long, long, long[:5]], num_shards=4, pages_per_shard=4
    )
    assert result.total_prefix_tokens == 512 * 85
    # all 16 pages; and of the 5 all but the one with the last token
    assert result.hit_tokens == 512 * (16 + 4)


def test_tokens_are_made_of_block_and_offset():
    tokens = replay_trace.prompt_tokens(np.array([3, replay_trace.MAX_BLOCK_ID]))
    assert tokens.dtype == np.int32
    assert tokens.size == np.unique(tokens).size == 1024
    assert tokens[0] == 3 * 512
    assert tokens[-1] == 2**31 - 1


def test_the_command_prints_one_json_object(capsys):
    result = _run(capsys, "--shards", "2", "--pages-per-shard", "100")
    assert list(result) == [
        "requests",
        "hit_tokens",
        "total_prefix_tokens",
        "hit_rate",
        "evictions",
        "declines",
        "seconds",
        "pages_per_second",
        "skipped_lines",
    ]
    assert result["requests"] == 200
    assert result["hit_rate"] == result["hit_tokens"] / result["total_prefix_tokens"]
    assert result["evictions"] > 0


def test_replicated_is_one_shards_capacity(capsys):
    copies = _run(capsys, "--shards", "8", "--pages-per-shard", "600", "--replicated")
    single = _run(capsys, "--shards", "1", "--pages-per-shard", "600")
    striped = _run(capsys, "--shards", "8", "--pages-per-shard", "600")
    assert copies["hit_tokens"] == single["hit_tokens"] < striped["hit_tokens"]


def test_the_command_prints_a_table(capsys):
    replay_trace.main([str(_TRACE), "--page-size", "256"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["requests", "200"]
    assert lines[1].split()[0] == "hit_tokens"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "expected an object, got list"),
        ("{}", "hash_ids=None must be a list of at least one id"),
        ('{"hash_ids": []}', "must be a list of at least one id"),
        ('{"hash_ids": [1, "2"]}', "hash_id='2' must be an int of 0..4194303"),
        ('{"hash_ids": [true]}', "hash_id=True must be an int"),
        ('{"hash_ids": [-1]}', "hash_id=-1 must be an int"),
        ('{"hash_ids": [4194304]}', "hash_id=4194304 must be an int"),
    ],
)
def test_a_bad_line_is_named_or_skipped(line, message, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"hash_ids": [1, 2]}}\n\n{line}\n{{"hash_ids": [1, 2, 3]}}\n')
    with pytest.raises(SystemExit) as stopped:
        replay_trace.main([str(trace), "--json"])
    assert f"{trace}:3: " in str(stopped.value)
    assert message in str(stopped.value)
    replay_trace.main([str(trace), "--json", "--skip-bad"])
    captured = capsys.readouterr()
    assert f"skipped {trace}:3: " in captured.err
    result = json.loads(captured.out)
    assert result["requests"] == 2
    assert result["skipped_lines"] == 1
    assert result["hit_tokens"] == 1024


def test_a_trace_without_requests_or_without_a_file_stops_with_a_message(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(SystemExit, match="has no requests"):
        replay_trace.main([str(empty)])
    with pytest.raises(SystemExit, match=r"missing\.jsonl"):
        replay_trace.main([str(tmp_path / "missing.jsonl")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "48"], "--page-size 48 must divide 512"),
        (["--page-size", "0"], "--page-size 0 must divide 512"),
        (["--page-size", "1024"], "--page-size 1024 must divide 512"),
        (["--shards", "0"], "--shards 0 must be at least 1"),
        (["--pages-per-shard", "0"], "--pages-per-shard 0 must be at least 1"),
        (["--policy", "random"], "invalid choice: 'random'"),
    ],
)
def test_bad_arguments_stop_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        replay_trace.main([str(_TRACE), *arguments])
    assert message in capsys.readouterr().err


def test_a_page_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"page_size=48 must divide .* 512 tokens"):
        replay_trace.replay(_read(), page_size=48)
    with pytest.raises(TraceError, match="not JSON"):
        replay_trace.parse_request("no")


def test_the_sweep_draws_a_line_for_each_number_of_shards(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(_TRACE.read_text().splitlines()[:30]))
    target = tmp_path / "hit_rate.png"
    replay_trace.main([str(trace), "--plot", str(target)])
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "sweep" in capsys.readouterr().err
    rates = replay_trace.sweep(_read()[:30], [10, 100])
    assert list(rates) == [1, 2, 4, 8]
    assert rates[8][0] >= rates[1][0]
    assert rates[8][1] >= rates[8][0]
