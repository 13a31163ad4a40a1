"""What a step costs on the host: plans, matches, draws, inserts.

    python examples/benchmarks/host.py --json examples/benchmarks/host.json

Medians of many runs, in microseconds, on simulated devices. Ratios compare with a peer
of the same run: fifteen device_puts against the packed plan, and a radix tree that
walks page by page in plain Python against the prefix cache.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

import jaxkv
from jaxkv import testing
from jaxkv.device.packing import pack_plan
from jaxkv.host.allocator import PageAllocator
from jaxkv.host.prefix_cache import PrefixCache

NUM_SHARDS = 8
PAGE_SIZE = 16
NUM_REQUESTS = 256
CONTEXT = 8192
PROMPT = 100_000


def median_us(function: Callable[[], Any], repeats: int = 100) -> float:
    """Median time of a call, in microseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure_plan() -> dict[str, float]:
    """A decode plan of 256 requests x 8k context, from batch to devices."""
    pages_per_shard = NUM_REQUESTS * CONTEXT // (NUM_SHARDS * PAGE_SIZE) + 512
    spec = jaxkv.CacheSpec(
        num_layers=1,
        kv=jaxkv.GQA(num_kv_heads=1, head_dim=8),
        page_size=PAGE_SIZE,
        pages_per_shard=pages_per_shard,
    )
    width = CONTEXT // (NUM_SHARDS * PAGE_SIZE) + 1
    cache = jaxkv.KVCache(
        spec,
        testing.simulated_mesh(kv=NUM_SHARDS),
        mode="striped",
        buckets=jaxkv.Buckets(
            tokens=(NUM_REQUESTS, CONTEXT),
            sequences=(NUM_REQUESTS,),
            table_widths=(width,),
            blocks=(width,),
        ),
    )
    requests = []
    for index in range(NUM_REQUESTS):
        request = cache.open(np.full(CONTEXT + 1, index))
        assert request is not None
        step = cache.plan([(request, CONTEXT)])
        assert step is not None
        cache.commit(step, cache.pool)
        requests.append(request)
    batch = [(request, 1) for request in requests]
    step = cache.plan(batch)
    assert step is not None
    group = cache.group
    specs = jaxkv.plan_specs(step.arrays, group)
    shardings = jaxkv.StepPlan(*(NamedSharding(group.mesh, spec) for spec in specs))

    def plan():
        jax.block_until_ready(cache.plan(batch).plan.data)  # pyright: ignore

    def pack():
        jax.block_until_ready(pack_plan(step.arrays, group).data)

    def put_apart():
        jax.block_until_ready(jax.device_put(step.arrays, shardings))

    packed_us, apart_us = median_us(pack), median_us(put_apart)
    return {
        "decode_plan_us": median_us(plan),
        "decode_plan_pack_and_transfer_us": packed_us,
        "transfer_ratio_to_fifteen_puts": packed_us / apart_us,
        "decode_plan_bytes": sum(array.nbytes for array in step.arrays),
    }


class PlainTree:
    """The peer: a radix tree that walks one page at a time through Python dicts."""

    def __init__(self):
        self._root: dict = {}

    def insert(self, tokens: list[int], pages: list[int]) -> None:
        """Adds a chain, page by page."""
        node = self._root
        for index, page in enumerate(pages):
            key = tuple(tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            _, node = node.setdefault(key, (page, {}))

    def match(self, tokens: list[int]) -> list[int]:
        """Pages of the longest known prefix."""
        node, found = self._root, []
        for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
            child = node.get(tuple(tokens[start : start + PAGE_SIZE]))
            if child is None:
                break
            found.append(child[0])
            node = child[1]
        return found


def measure_tree() -> dict[str, float]:
    """A 100k-token prompt: drawn, inserted, matched, evicted, freed."""
    num_pages = PROMPT // PAGE_SIZE
    pages_per_shard = num_pages // NUM_SHARDS + 2
    allocator = PageAllocator(NUM_SHARDS, pages_per_shard)
    tokens = np.random.default_rng(0).integers(0, 50_000, PROMPT).astype(np.int32)
    times: dict[str, list[float]] = {
        "allocate": [],
        "insert": [],
        "match": [],
        "evict": [],
        "free": [],
    }
    tree = PrefixCache(NUM_SHARDS, pages_per_shard, PAGE_SIZE)

    def timed(name: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        times[name].append((time.perf_counter() - start) * 1e6)
        return result

    prompt = np.append(tokens, 0)
    wanted = np.full(NUM_SHARDS, pages_per_shard - 1)
    for _ in range(50):
        pages = timed("allocate", lambda: allocator.allocate(num_pages))
        timed("insert", lambda pages=pages: tree.insert(tokens, pages))
        match = timed("match", lambda: tree.match(prompt))
        assert match.num_pages == num_pages
        free = allocator.free_per_owner()
        evicted = timed("evict", lambda free=free: tree.evict(wanted, free))
        timed("free", lambda evicted=evicted: allocator.free(evicted))
    plain = PlainTree()
    token_list = tokens.tolist()
    plain.insert(token_list, list(range(num_pages)))
    plain_us = median_us(lambda: plain.match(token_list), 20)
    medians = {
        f"{name}_100k_tokens_us": statistics.median(taken)
        for name, taken in times.items()
    }
    medians["match_ratio_to_plain_tree"] = medians["match_100k_tokens_us"] / plain_us
    return medians


def main() -> None:
    """Measures, prints a small table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description="Host time of a step.")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    testing.simulate_devices(NUM_SHARDS)
    figures = measure_plan() | measure_tree()
    for name, value in figures.items():
        print(f"{name:42} {value:12.3f}")
    if args.json:
        record = {
            "command": "python examples/benchmarks/host.py",
            "machine": f"{platform.machine()}, CPU only",
            "python": platform.python_version(),
            "jax": jax.__version__,
            "figures": {name: round(value, 4) for name, value in figures.items()},
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
