"""SmolLM2's goldens, exactly, from a cache striped over 1, 2, 3, 4 and 8 devices.

Source of the goldens: HF transformers in float32, equal to llama.cpp on an F32 copy of
the file (tests/data/smollm2_goldens.json). The default run takes a sample in which
every value of every parameter occurs; `-m slow` takes the whole grid.
"""

import functools
import itertools
import json
import pathlib

import generate
import pytest
import weights

DATA = pathlib.Path(__file__).parents[1] / "data" / "smollm2_goldens.json"
CASES = json.loads(DATA.read_text())["cases"]
PROMPTS = [case["prompt_ids"] for case in CASES]
GOLDENS = [case["new_ids"] for case in CASES]

DEVICES = (1, 2, 3, 4, 8)
MODES = ("assembled", "striped")
PAGE_SIZES = (1, 4, 16, 64)
CHUNKS = (8, 100, None)  # None: whole prompts in one step
SAMPLE = {
    (1, "assembled", 16, None),
    (2, "striped", 1, 8),
    (3, "assembled", 64, 100),
    (4, "striped", 4, 100),
    (8, "assembled", 16, 100),
}


@functools.cache
def _checkpoint():
    return weights.load("smollm2")


@functools.lru_cache(maxsize=1)
def _model(devices):
    """The model placed once for all runs on so many devices."""
    return generate.place_model(_checkpoint(), generate.make_mesh(devices, 1))


def _generate(devices, mode, page_size, chunk, prompts, *options):
    longest = max(map(len, prompts))
    args = generate.parse_args(
        [
            f"--devices={devices}",
            f"--mode={mode}",
            f"--page-size={page_size}",
            f"--chunk={chunk or sum(map(len, prompts))}",
            *options,
        ]
    )
    generator = generate.build(args, _model(devices), len(prompts), longest + 20)
    new_ids = [[] for _ in prompts]
    for index, token in generator.generate(prompts, 20):
        new_ids[index].append(token)
    assert generator.cache.requests == ()
    assert sum(generator.cache.pages_per_shard()) == 0
    return new_ids


@pytest.mark.parametrize(
    ("devices", "mode", "page_size", "chunk"),
    [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
        for case in itertools.product(DEVICES, MODES, PAGE_SIZES, CHUNKS)
    ],
)
def test_goldens_come_out_exactly(devices, mode, page_size, chunk):
    # as one batch of unequal lengths, and one prompt alone: another for each chunk
    assert _generate(devices, mode, page_size, chunk, PROMPTS) == GOLDENS
    if (devices, mode, page_size, chunk) in SAMPLE and devices > 2:
        return  # compiling for one prompt more costs the default run too much
    alone = CHUNKS.index(chunk) + (1 if mode == "striped" else 0)
    got = _generate(devices, mode, page_size, chunk, [PROMPTS[alone]])
    assert got == [GOLDENS[alone]]


@pytest.mark.parametrize(
    "mode", ["auto", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES)]
)
def test_goldens_with_tokens_sharded_over_the_devices(mode):
    assert _generate(2, mode, 4, 8, PROMPTS, "--shard-tokens") == GOLDENS
