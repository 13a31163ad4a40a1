"""The command line of generate.py, on a tiny Hugging Face folder."""

import json

import generate
import pytest
from test_weights import _make_folder, _make_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    _make_folder(path, _make_tensors(tied=True))
    return str(path)


def _run(capsys, folder, *options):
    generate.main(["--model", folder, "--max-new-tokens", "5", *options])
    return capsys.readouterr().out


def test_json_is_one_line_a_prompt_and_nothing_else(capsys, folder, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["abcabc", "b"]))
    lines = {}
    for options in (
        ("--devices=2", "--page-size=2"),
        ("--devices=4", "--head-devices=2", "--no-batch", "--mode=striped"),
    ):
        out = _run(
            capsys,
            folder,
            "--json",
            "--prompt=aa",
            f"--prompt-file={prompts}",
            *options,
        )
        lines[options] = [json.loads(line) for line in out.splitlines()]
    first = lines[("--devices=2", "--page-size=2")]
    assert len(first) == 3
    assert set(first[0]) == {
        "prompt_ids",
        "new_ids",
        "text",
        "mode",
        "num_shards",
        "pages_per_shard",
    }
    for other in lines.values():
        assert [line["new_ids"] for line in other] == [
            line["new_ids"] for line in first
        ]
    for line in first:
        assert line["num_shards"] == len(line["pages_per_shard"]) == 2
        computed = len(line["prompt_ids"]) + len(line["new_ids"]) - 1
        assert sum(line["pages_per_shard"]) == -(-computed // 2)


def test_text_streams_and_ends_with_the_caches_use(capsys, folder):
    out = _run(capsys, folder, "--devices=2", "--prompt=ab", "--page-size=2")
    assert out.startswith("\n> ab")
    assert "a replicated cache would hold 4" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices=3", "--head-devices=2"], "--head-devices 2 does not divide"),
        (["--page-size=0"], "--page-size must be at least 1"),
        (["--mode=both"], "invalid choice"),
        (["--devices=99"], "--devices 99 exceeds the 8 cpu devices"),
        (["--model=nowhere"], "neither a folder nor one of"),
        (["--prompt-file=nowhere.json"], "nowhere.json"),
        (["--devices=8", "--head-devices=8"], "does not divide num_kv_heads"),
    ],
)
def test_a_bad_command_ends_with_its_reason(capsys, folder, options, message):
    with pytest.raises(SystemExit) as ended:
        generate.main(["--model", folder, *options])
    assert message in str(ended.value) + capsys.readouterr().err
