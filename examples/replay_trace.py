"""Replays a Mooncake trace through the prefix cache: what does capacity buy?

    python examples/replay_trace.py TRACE.jsonl --shards 8 --pages-per-shard 1250 --json
    python examples/replay_trace.py TRACE.jsonl --plot hit_rate.png

A trace line is one request, `{"hash_ids": [0, 1, 2], ...}`: each id names 512 tokens
and all before them. The request's prompt is all its blocks, whole. No model runs; the
pages are matched, leased, evicted, allocated and inserted as a serving loop would, one
request after the other. Outputs are not cached.

A request that is larger than the pool keeps what fits: its first pages are cached, the
rest are computed and forgotten. All its blocks count as asked.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence

import numpy as np
from tqdm import tqdm

from jaxkv import placement
from jaxkv.host.allocator import PageAllocator
from jaxkv.host.eviction import POLICIES
from jaxkv.host.prefix_cache import PrefixCache

BLOCK_SIZE = 512
"""Tokens that one id of the trace stands for."""

MAX_BLOCK_ID = 2**31 // BLOCK_SIZE - 1
"""The last id whose tokens are int32."""

SWEEP_SHARDS = (1, 2, 4, 8)


class TraceError(Exception):
    """A line of the trace is no request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay measured.

    Attributes:
      requests: requests of the trace.
      hit_tokens: prompt tokens found in the cache.
      total_prefix_tokens: prompt tokens of all requests.
      hit_rate: blocks hit / blocks asked.
      evictions: pages evicted.
      declines: inserts declined for their rotation base.
      seconds: time of the replay, tokens made and all.
      pages_per_second: pages asked in a second.
    """

    requests: int
    hit_tokens: int
    total_prefix_tokens: int
    hit_rate: float
    evictions: int
    declines: int
    seconds: float
    pages_per_second: float


def read_trace(
    lines: Iterable[str], name: str = "trace", skip_bad: bool = False
) -> tuple[list[np.ndarray], int]:
    """Parses a trace.

    Args:
      lines: JSON objects, one a line; blank lines are passed over.
      name: what messages call the trace.
      skip_bad: leave bad lines out, saying so on stderr.

    Returns:
      Block ids of each request, int64[num_blocks]; and the number of bad lines.

    Raises:
      TraceError: a line is no request, with its number; not under `skip_bad`.
    """
    requests = []
    num_bad = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(parse_request(line))
        except TraceError as error:
            message = f"{name}:{number}: {error}"
            if not skip_bad:
                raise TraceError(message) from None
            print(f"skipped {message}", file=sys.stderr)
            num_bad += 1
    return requests, num_bad


def parse_request(line: str) -> np.ndarray:
    """Block ids of one line, int64[num_blocks].

    >>> parse_request('{"timestamp": 0, "hash_ids": [0, 7]}')
    array([0, 7])
    """
    try:
        request = json.loads(line)
    except ValueError as error:
        raise TraceError(f"not JSON: {error}") from None
    if not isinstance(request, dict):
        raise TraceError(f"expected an object, got {type(request).__name__}")
    hash_ids = request.get("hash_ids")
    if not isinstance(hash_ids, list) or not hash_ids:
        raise TraceError(f"hash_ids={hash_ids!r} must be a list of at least one id")
    for hash_id in hash_ids:
        if type(hash_id) is not int or not 0 <= hash_id <= MAX_BLOCK_ID:
            raise TraceError(f"{hash_id=} must be an int of 0..{MAX_BLOCK_ID}")
    return np.array(hash_ids, np.int64)


def prompt_tokens(block_ids: np.ndarray) -> np.ndarray:
    """Token ids of whole blocks, int32[num_blocks * 512]: (block id, offset) as one.

    >>> prompt_tokens(np.array([0, 3]))[[0, 511, 512]].tolist()
    [0, 511, 1536]
    """
    first = block_ids.astype(np.int32)[:, None] * BLOCK_SIZE
    return (first + np.arange(BLOCK_SIZE, dtype=np.int32)).ravel()


class Replayer:
    """A cache and its pages, and how one request passes through them."""

    def __init__(
        self, num_shards: int, pages_per_shard: int, page_size: int, policy: str = "lru"
    ):
        """Makes an empty pool; the reserved page comes on top of `pages_per_shard`."""
        self.allocator = PageAllocator(num_shards, pages_per_shard + 1)
        self.cache = PrefixCache(
            num_shards, pages_per_shard + 1, page_size, policy=POLICIES[policy]
        )

    def serve(self, tokens: np.ndarray) -> None:
        """Matches, "computes" and caches one prompt, int32[num_pages * page_size]."""
        cache = self.cache
        match = cache.match(tokens)
        lease = cache.lease(match)
        missing = tokens.size // cache.page_size - match.num_pages
        drawn = self.draw(missing, match.pages)
        pages = np.concatenate([match.pages, drawn])
        insertion = cache.insert(
            tokens[: pages.size * cache.page_size], pages, lease=lease
        )
        self._free(drawn if insertion.declined else insertion.surplus)
        cache.release(lease)

    def draw(self, num_pages: int, chain: np.ndarray) -> np.ndarray:
        """Pages for a chain to go on with: `num_pages`, or as many as there can be."""
        num_shards = self.cache.num_shards
        shards = np.arange(num_shards)
        if chain.size:
            first = (int(chain[-1]) + 1) % num_shards
        else:
            first = self.allocator.best_root()
        free = self.allocator.free_per_owner()
        wanted = placement.pages_per_owner(num_pages, first, shards, num_shards)
        evicted = self.cache.evict(wanted, free)
        if evicted is None:
            # a chain ends before the first page whose owner has no more
            room = free + self.cache.evictable_per_owner()
            fits = room * num_shards + (shards - first) % num_shards
            return self.draw(int(fits.min()), chain)
        self._free(evicted)
        drawn = self.allocator.allocate(num_pages, first)
        assert drawn is not None
        return drawn

    def _free(self, pages: np.ndarray) -> None:
        if pages.size:
            self.allocator.free(pages)


def replay(
    requests: Sequence[np.ndarray],
    *,
    num_shards: int = 8,
    pages_per_shard: int | None = None,
    page_size: int = BLOCK_SIZE,
    policy: str = "lru",
    progress: tqdm | None = None,
) -> Replay:
    """Replays requests, in order, through one pool.

    Args:
      requests: block ids of each request, integers [num_blocks].
      num_shards: shards of the group.
      pages_per_shard: usable pages a shard; None for as many as are ever asked.
      page_size: tokens a page; divides 512.
      policy: a name of `jaxkv.host.eviction.POLICIES`.
      progress: a bar that advances by one a request.

    Raises:
      ValueError: the page size does not divide 512.
    """
    if page_size < 1 or BLOCK_SIZE % page_size:
        raise ValueError(f"{page_size=} must divide the trace's {BLOCK_SIZE} tokens")
    num_pages = sum(ids.size for ids in requests) * (BLOCK_SIZE // page_size)
    if pages_per_shard is None:
        # each request may take one page more of an owner than its share
        pages_per_shard = num_pages // num_shards + len(requests) + 1
    replayer = Replayer(num_shards, pages_per_shard, page_size, policy)
    start = time.perf_counter()
    for block_ids in requests:
        replayer.serve(prompt_tokens(block_ids))
        if progress is not None:
            progress.update()
    seconds = time.perf_counter() - start
    stats = replayer.cache.stats()
    return Replay(
        requests=len(requests),
        hit_tokens=stats.hit_tokens,
        total_prefix_tokens=stats.asked_tokens,
        hit_rate=stats.hit_tokens / max(1, stats.asked_tokens),
        evictions=stats.evicted_pages,
        declines=stats.declined_inserts,
        seconds=seconds,
        pages_per_second=num_pages / max(seconds, 1e-9),
    )


def sweep_capacities(requests: Sequence[np.ndarray], num_points: int = 8) -> list[int]:
    """Blocks a device to try: half a trace's distinct blocks, halved again and again.

    >>> sweep_capacities([np.arange(40), np.arange(100)], num_points=3)
    [12, 25, 50]
    """
    distinct = np.unique(np.concatenate(requests)).size
    return sorted({max(1, distinct >> power) for power in range(1, num_points + 1)})


def sweep(
    requests: Sequence[np.ndarray], capacities: Sequence[int], policy: str = "lru"
) -> dict[int, list[float]]:
    """Hit rates by number of shards, one for each capacity (blocks a device)."""
    runs = len(SWEEP_SHARDS) * len(capacities)
    rates = {}
    with tqdm(total=runs * len(requests), desc="sweep", unit="req") as progress:
        for num_shards in SWEEP_SHARDS:
            rates[num_shards] = [
                replay(
                    requests,
                    num_shards=num_shards,
                    pages_per_shard=capacity,
                    policy=policy,
                    progress=progress,
                ).hit_rate
                for capacity in capacities
            ]
    return rates


def plot_sweep(
    path: str, capacities: Sequence[int], rates: dict[int, list[float]], limit: float
) -> None:
    """Draws hit rate against memory a device, a line for each number of shards."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    memory = np.array(capacities) * BLOCK_SIZE
    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    shades = pyplot.get_cmap("viridis")(np.linspace(0.85, 0.1, len(rates)))
    for shade, (num_shards, line) in zip(shades, rates.items(), strict=True):
        label = f"{num_shards} shards"
        if num_shards == 1:
            label = "1 shard, or any number of full copies"
        percent = 100 * np.array(line)
        axes.plot(memory, percent, "o-", color=shade, label=label, linewidth=2)
    axes.axhline(100 * limit, color="0.5", linestyle="--", linewidth=1)
    axes.annotate(
        f"no limit: {100 * limit:.1f} %",
        (memory[0], 100 * limit),
        xytext=(0, 4),
        textcoords="offset points",
        color="0.3",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(memory, minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _short(tokens)))
    axes.set_xlabel("KV memory a device (tokens)")
    axes.set_ylabel("prefix blocks found in the cache (%)")
    axes.set_ylim(0, 100 * limit * 1.12 + 1e-3)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _short(tokens: float) -> str:
    """A count of tokens in few characters."""
    if tokens < 1e6:
        return f"{tokens / 1e3:.0f}k"
    return f"{tokens / 1e6:.3g}M"


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Replay a Mooncake trace through the prefix cache."
    )
    parser.add_argument("trace", help="JSON lines with hash_ids of 512-token blocks")
    parser.add_argument("--shards", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--pages-per-shard",
        type=int,
        help="usable pages a shard (the reserved page comes on top); default: no limit",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        default=BLOCK_SIZE,
        help="tokens a page, a divisor of 512; default: %(default)s",
    )
    parser.add_argument("--policy", choices=POLICIES, default="lru")
    parser.add_argument(
        "--replicated",
        action="store_true",
        help="each shard holds a whole copy: the group's capacity is that of one shard",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw hit rate against memory a device for 1, 2, 4 and 8 shards instead",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out lines that are no request"
    )
    options = parser.parse_args(arguments)
    if options.shards < 1:
        parser.error(f"--shards {options.shards} must be at least 1")
    if options.pages_per_shard is not None and options.pages_per_shard < 1:
        parser.error(f"--pages-per-shard {options.pages_per_shard} must be at least 1")
    if options.page_size < 1 or BLOCK_SIZE % options.page_size:
        parser.error(f"--page-size {options.page_size} must divide {BLOCK_SIZE}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = _parse_arguments(arguments)
    try:
        with open(options.trace) as lines:
            requests, num_bad = read_trace(lines, options.trace, options.skip_bad)
        if not requests:
            raise TraceError(f"{options.trace} has no requests")
    except (OSError, TraceError) as error:
        raise SystemExit(f"replay_trace: {error}") from None
    if options.plot:
        capacities = sweep_capacities(requests)
        rates = sweep(requests, capacities, options.policy)
        limit = replay(requests, policy=options.policy).hit_rate
        plot_sweep(options.plot, capacities, rates, limit)
        print(f"wrote {options.plot}")
        return
    with tqdm(total=len(requests), desc="replay", unit="req") as progress:
        result = replay(
            requests,
            num_shards=1 if options.replicated else options.shards,
            pages_per_shard=options.pages_per_shard,
            page_size=options.page_size,
            policy=options.policy,
            progress=progress,
        )
    report = dataclasses.asdict(result) | {"skipped_lines": num_bad}
    if options.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:>20}  {value:,.3f}".rstrip("0").rstrip("."))


if __name__ == "__main__":
    main()
