"""Pictures of a cache and of a plan, for people: as arrays, as text, as figures.

    physical page   0123456789          A B C   private pages of a request
    shard 0         xAAbb+....          a b c   cached pages that a request leases
    shard 1         xABbb.....          +       cached, free to evict
                                        .       free        x   reserved

`pool_map` and `plan_map` are plain numpy and tuples; the text needs rich and the
figures matplotlib, which are imported when asked for. All of it reads the host side
only: it moves nothing to or from a device and changes nothing.
"""

import dataclasses
import enum
import importlib
import string
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxkv import placement
from jaxkv.cache import KVCache
from jaxkv.host.step import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.text import Text

_COLORS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1"),
    *("#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#86bcb6"),
)
_FREE, _CACHED, _RESERVED, _SHARED = "#f4f4f4", "#c4c4c4", "#555555", "#8c8c8c"
_MOST_LABELLED = 32  # columns whose cells have room for text
_LETTERS = string.ascii_uppercase


class PageState(enum.IntEnum):
    """What a physical page is used for."""

    RESERVED = 0
    FREE = 1
    CACHED = 2  # in the prefix cache, without a lease
    PROTECTED = 3  # in the prefix cache, under a lease
    PRIVATE = 4  # of requests only


@dataclasses.dataclass(frozen=True, eq=False)
class PoolMap:
    """Every physical page of a pool at one moment. Made by `pool_map`.

    Attributes:
      states: a `PageState` each, int8[num_shards, pages_per_shard].
      request_ids: id of the oldest open request whose chain has the page, -1 where
        there is none, int32[num_shards, pages_per_shard].
      num_requests: open requests whose chains have the page, int32 like those.
    """

    states: np.ndarray
    request_ids: np.ndarray
    num_requests: np.ndarray

    @property
    def num_shards(self) -> int:
        """Shards of the group."""
        return self.states.shape[0]

    @property
    def pages_per_shard(self) -> int:
        """Physical pages a shard, the reserved page included."""
        return self.states.shape[1]

    def count(self, state: PageState) -> np.ndarray:
        """Pages of each owner in a state, int32[num_shards]."""
        return (self.states == state).sum(axis=1, dtype=np.int32)


class PageRead(NamedTuple):
    """A prefix page that a step reads."""

    round: int  # gather round; 0 of a striped step
    owner: int  # shard that stores it
    physical_page: int  # in its owner's pool
    scratch_page: int  # where a gather puts it; -1 where it is read in place (striped)
    sequences: tuple[int, ...]  # indices in the batch that read it


class PageWrite(NamedTuple):
    """Slots of a page that a step writes."""

    owner: int
    physical_page: int
    first_slot: int
    num_slots: int
    sequence: int  # index in the batch


@dataclasses.dataclass(frozen=True)
class PlanMap:
    """What a step reads and writes, page by page. Made by `plan_map`.

    Attributes:
      mode: "assembled" or "striped".
      num_shards: shards of the group.
      page_size: tokens a page.
      num_rounds: gathers a layer; 0 if striped.
      block: pages that each shard sends in one gather, padding included.
      round_starts: token position at which each round starts.
      request_ids: id of each request of the batch.
      prefix_lens: tokens of each that the pool held before the step.
      counts: new tokens of each.
      reads: in order of round, owner and (scratch or physical) page.
      writes: in order of owner, sequence and position.
    """

    mode: str
    num_shards: int
    page_size: int
    num_rounds: int
    block: int
    round_starts: tuple[int, ...]
    request_ids: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    counts: tuple[int, ...]
    reads: tuple[PageRead, ...]
    writes: tuple[PageWrite, ...]


def pool_map(cache: KVCache) -> PoolMap:
    """Says of every physical page what it is used for, and by which requests.

    A page that the prefix cache dropped while a request held it is private; one that is
    cached without a lease counts as cached even where a fork holds it too.

    Args:
      cache: any cache; nothing about it changes.
    """
    chains = cache._chains
    num_shards, pages_per_shard = cache.num_shards, cache.spec.pages_per_shard
    num_pages = num_shards * pages_per_shard
    # by logical page, which is physical-major: one reshape turns it
    states = np.full(num_pages, PageState.PRIVATE, np.int8)
    states[:num_shards] = PageState.RESERVED
    usable = np.arange(num_shards, num_pages)
    states[usable[chains.allocator.holds(usable) == 0]] = PageState.FREE
    if chains.prefix_cache.pages().size:
        states[chains.prefix_cache.pages()] = PageState.CACHED
    request_ids = np.full(num_pages, -1, np.int32)
    num_requests = np.zeros(num_pages, np.int32)
    for request in reversed(cache.requests):
        pages = request.pages()
        request_ids[pages] = request.id
        num_requests[pages] += 1
        if request.lease is not None:
            states[pages[: request.lease.num_pages]] = PageState.PROTECTED

    def by_owner(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values.reshape(pages_per_shard, num_shards).T)

    return PoolMap(by_owner(states), by_owner(request_ids), by_owner(num_requests))


def plan_map(step: Step) -> PlanMap:
    """Lists the pages that a step reads and the slots that it writes.

    Args:
      step: any step of `KVCache.plan`, also one that is committed or stale.

    Raises:
      ValueError: the step has no requests (a warm-up step).
    """
    if not step.requests:
        raise ValueError("a warm-up step has no requests: nothing to show")
    arrays = step.arrays
    page_size = step.requests[0]._table.page_size
    num = len(step.requests)
    return PlanMap(
        mode=step.mode,
        num_shards=arrays.write_rows.shape[0],
        page_size=page_size,
        num_rounds=arrays.num_rounds,
        block=arrays.block,
        round_starts=tuple(arrays.round_starts[: arrays.num_rounds].tolist()),
        request_ids=tuple(request.id for request in step.requests),
        prefix_lens=tuple(arrays.prefix_lens[:num].tolist()),
        counts=tuple(step.counts.tolist()),
        reads=_reads(step, page_size),
        writes=_writes(step, page_size),
    )


def pool_text(cache: KVCache, columns: int = 64) -> "Text":
    """The map of the pool as rich text: `rich.print(pool_text(cache))`.

    Args:
      cache: any cache.
      columns: pages a line.

    Raises:
      ImportError: rich is not installed (the `examples` extra has it).
      ValueError: `columns` is less than 1.
    """
    if columns < 1:
        raise ValueError(f"{columns=} must be at least 1")
    text = _optional("rich.text").Text
    pool = pool_map(cache)
    order = _order(cache)
    lines = text()
    for start in range(0, pool.pages_per_shard, columns):
        stop = min(start + columns, pool.pages_per_shard)
        lines.append(f"pages {start}-{stop - 1}\n", style="bold")
        for owner in range(pool.num_shards):
            lines.append(f"  shard {owner:<3} ")
            for page in range(start, stop):
                symbol, style = _page_symbol(pool, owner, page, order)
                lines.append(symbol, style=style)
            lines.append("\n")
    lines.append(". free   + cached   x reserved   ")
    lines.append("A private   a cached and leased\n")
    for request in cache.requests:
        own = pool.request_ids == request.id
        private = int((own & (pool.states == PageState.PRIVATE)).sum())
        index = order[request.id]
        letter = _letter(index)
        lines.append(f"{letter} {letter.lower()}", style=_color(index))
        state = "preempted" if request.is_preempted else f"{private} private"
        lines.append(f"  request {request.id}: {request.num_pages} pages, {state}\n")
    return lines


def pool_figure(cache: KVCache) -> "Figure":
    """The map of the pool as a matplotlib figure: `pool_figure(cache).savefig(path)`.

    One row a shard, one cell a physical page. Private pages have their request's
    colour, leased ones the same colour lightened.

    Raises:
      ImportError: matplotlib is not installed (the `examples` extra has it).
    """
    figure_class = _optional("matplotlib.figure").Figure
    to_rgb = _optional("matplotlib.colors").to_rgb
    patch = _optional("matplotlib.patches").Patch
    pool = pool_map(cache)
    order = _order(cache)
    colors = np.array([to_rgb(color) for color in (*_COLORS, _FREE)])
    place = [order.get(request_id, -1) for request_id in pool.request_ids.flat]
    place = np.array(place).reshape(pool.states.shape)
    image = colors[np.where(place < 0, -1, place % len(_COLORS))]
    image[pool.states == PageState.PROTECTED] *= 0.55
    image[pool.states == PageState.PROTECTED] += 0.45
    image[pool.states == PageState.CACHED] = to_rgb(_CACHED)
    image[pool.states == PageState.RESERVED] = to_rgb(_RESERVED)
    width = float(np.clip(2.0 + 0.28 * pool.pages_per_shard, 6.0, 16.0))
    figure = figure_class(
        figsize=(width, 1.9 + 0.32 * pool.num_shards), layout="constrained"
    )
    axes = figure.subplots()
    edges = [np.arange(size + 1) - 0.5 for size in reversed(pool.states.shape)]
    is_small = pool.pages_per_shard <= 64
    axes.pcolormesh(
        *edges, image, edgecolors="white" if is_small else "none", linewidth=0.8
    )
    if is_small:
        for owner, page in np.ndindex(*pool.states.shape):
            symbol, _ = _page_symbol(pool, owner, page, order)
            if symbol.isalpha() and symbol != "x":
                axes.text(page, owner, symbol, ha="center", va="center", fontsize=8)
    _label_shards(axes, pool.num_shards)
    axes.set_xlabel("physical page (A: private, a: cached and leased)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    totals = {state: int(pool.count(state).sum()) for state in PageState}
    axes.set_title(
        ", ".join(
            f"{totals[state]} {state.name.lower()}"
            for state in PageState
            if state != PageState.RESERVED
        )
        + " pages",
        fontsize=10,
    )
    handles = [
        patch(facecolor=_FREE, edgecolor="#aaaaaa", label="free"),
        patch(facecolor=_CACHED, label="cached"),
        patch(facecolor=_RESERVED, label="reserved"),
    ]
    for request in cache.requests[:20]:
        index = order[request.id]
        label = f"{_letter(index)} request {request.id}"
        handles.append(patch(facecolor=_color(index), label=label))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=max(1, int(width / 1.2)),
        fontsize=8,
        frameon=False,
    )
    return figure


def plan_text(step: Step) -> "Text":
    """A step's reads and writes as rich text: `rich.print(plan_text(step))`.

    Of an assembled step, `5>2` is physical page 5, sent into scratch page 2; of a
    striped one, `5` is physical page 5, read where it is. `5[0:3]` are slots 0 to 2 of
    physical page 5, written. Letters are the requests that read or write.

    Raises:
      ImportError: rich is not installed (the `examples` extra has it).
      ValueError: the step has no requests (a warm-up step).
    """
    text = _optional("rich.text").Text
    plan = plan_map(step)
    lines = text(f"{plan.mode} step\n", style="bold")
    for index, request_id in enumerate(plan.request_ids):
        lines.append(f"  {_letter(index)}", style=_color(index))
        lines.append(
            f"  request {request_id}: {plan.counts[index]} new tokens after "
            f"{plan.prefix_lens[index]}\n"
        )
    for number in range(max(1, plan.num_rounds)):
        lines.append(_read_title(plan, number) + "\n", style="bold")
        for owner in range(plan.num_shards):
            lines.append(f"  shard {owner:<3}")
            for read in plan.reads:
                if (read.round, read.owner) == (number, owner):
                    target = f">{read.scratch_page}" if plan.num_rounds else ""
                    _append_page(lines, f"{read.physical_page}{target}", read.sequences)
            lines.append("\n")
    lines.append("writes\n", style="bold")
    for owner in range(plan.num_shards):
        lines.append(f"  shard {owner:<3}")
        for write in plan.writes:
            if write.owner == owner:
                end = write.first_slot + write.num_slots
                slots = f"{write.physical_page}[{write.first_slot}:{end}]"
                _append_page(lines, slots, (write.sequence,))
        lines.append("\n")
    return lines


def plan_figure(step: Step) -> "Figure":
    """A step's reads and writes as a matplotlib figure.

    One row a shard. Above, for each gather round the pages that a shard sends, at their
    place in its part of the scratch, or for a striped step the pages that it reads; a
    page that several requests read is grey. Below, the pages that it writes, each
    filled over the slots that are written.

    Raises:
      ImportError: matplotlib is not installed (the `examples` extra has it).
      ValueError: the step has no requests (a warm-up step).
    """
    figure_class = _optional("matplotlib.figure").Figure
    patch = _optional("matplotlib.patches").Patch
    plan = plan_map(step)
    panels = max(1, plan.num_rounds)
    reads = [_read_cells(plan, number) for number in range(panels)]
    writes = _write_cells(plan)
    columns = max([4, plan.block, *(c.column + 1 for cells in reads for c in cells)])
    written = max([4, *(c.column + 1 for c in writes)])
    height = (0.9 + 0.36 * plan.num_shards) * (panels + 1) + 0.8
    figure = figure_class(
        figsize=(float(np.clip(1.5 + 0.75 * max(columns, written), 6.0, 20.0)), height),
        layout="constrained",
    )
    subplots = figure.subplots(panels + 1, 1, squeeze=False)[:, 0]
    for number, cells in enumerate(reads):
        axes = subplots[number]
        _draw_cells(axes, cells, plan.num_shards, columns)
        axes.set_title(_read_title(plan, number), loc="left", fontsize=10)
        if plan.num_rounds:
            _draw_padding(axes, plan, number)
            axes.set_xlabel("page in the shard's part of the scratch", fontsize=8)
    _draw_cells(subplots[-1], writes, plan.num_shards, written)
    subplots[-1].set_title(
        f"writes: pages of {plan.page_size} slots, filled where written",
        loc="left",
        fontsize=10,
    )
    handles = [
        patch(
            facecolor=_color(index),
            label=f"{_letter(index)} request {request_id}: "
            f"{plan.counts[index]} new after {plan.prefix_lens[index]}",
        )
        for index, request_id in list(enumerate(plan.request_ids))[:20]
    ]
    if any(len(read.sequences) > 1 for read in plan.reads):
        handles.append(patch(facecolor=_SHARED, label="read by several"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    return figure


class _Cell(NamedTuple):
    """One page in a figure of a plan."""

    owner: int
    column: int
    label: str
    color: str
    start: float  # filled part of the page, 0 to 1
    stop: float


def _reads(step: Step, page_size: int) -> tuple[PageRead, ...]:
    arrays = step.arrays
    num_shards = arrays.write_rows.shape[0]
    num = len(step.requests)
    totals = -(-arrays.prefix_lens[:num] // page_size)
    # (round, owner, scratch or local index) -> physical page and who reads it
    readers: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
    for sequence in range(num):
        total, base = int(totals[sequence]), int(arrays.bases[sequence])
        if arrays.is_striped:
            for owner in range(num_shards):
                size = int(placement.pages_per_owner(total, base, owner, num_shards))
                for page in arrays.page_table[owner, sequence, :size].tolist():
                    found = readers.setdefault((0, owner, page), (page, []))
                    found[1].append(sequence)
            continue
        starts = np.minimum(arrays.round_starts // page_size, total).tolist()
        for number in range(arrays.num_rounds):
            size = starts[number + 1] - starts[number]
            for scratch in arrays.page_table[number, sequence, :size].tolist():
                owner, place = divmod(scratch, arrays.block)
                page = int(arrays.send_pages[owner, number, place])
                found = readers.setdefault((number, owner, scratch), (page, []))
                found[1].append(sequence)
    return tuple(
        PageRead(number, owner, page, -1 if arrays.is_striped else place, tuple(who))
        for (number, owner, place), (page, who) in sorted(readers.items())
    )


def _writes(step: Step, page_size: int) -> tuple[PageWrite, ...]:
    arrays = step.arrays
    writes: list[PageWrite] = []
    for owner, rows in enumerate(arrays.write_rows):
        ends = arrays.stage_cu_lens[owner]
        for sequence in range(len(step.requests)):
            for row in rows[ends[sequence] : ends[sequence + 1]].tolist():
                page, slot = divmod(row, page_size)
                last = writes[-1] if writes else None
                if last is not None and (
                    (last.owner, last.sequence, last.physical_page)
                    == (owner, sequence, page)
                    and last.first_slot + last.num_slots == slot
                ):
                    writes[-1] = last._replace(num_slots=last.num_slots + 1)
                else:
                    writes.append(PageWrite(owner, page, slot, 1, sequence))
    return tuple(writes)


def _optional(name: str) -> Any:
    """Imports a module of an optional package."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise ImportError(
            f"this picture needs {package}, which comes with the `examples` extra: "
            "install jaxkv[examples]"
        ) from error


def _order(cache: KVCache) -> dict[int, int]:
    """Each open request's place, which gives its letter and colour."""
    return {request.id: index for index, request in enumerate(cache.requests)}


def _letter(index: int) -> str:
    return _LETTERS[index % len(_LETTERS)]


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def _page_symbol(
    pool: PoolMap, owner: int, page: int, order: dict[int, int]
) -> tuple[str, str]:
    """A page's character and its style in text."""
    state = pool.states[owner, page]
    if state == PageState.RESERVED:
        return "x", "dim"
    if state == PageState.FREE:
        return ".", "dim"
    if state == PageState.CACHED:
        return "+", ""
    index = order[int(pool.request_ids[owner, page])]
    letter = _letter(index)
    return (letter if state == PageState.PRIVATE else letter.lower()), _color(index)


def _append_page(lines: "Text", label: str, sequences: tuple[int, ...]) -> None:
    lines.append(f"  {label} ")
    for sequence in sequences:
        lines.append(_letter(sequence), style=_color(sequence))


def _read_title(plan: PlanMap, number: int) -> str:
    if not plan.num_rounds:
        return "reads in place"
    start = plan.round_starts[number]
    return (
        f"gather {number + 1} of {plan.num_rounds}: prefixes from token {start} on, "
        f"{plan.block} pages a shard"
    )


def _read_cells(plan: PlanMap, number: int) -> list[_Cell]:
    cells = []
    used = [0] * plan.num_shards
    for read in plan.reads:
        if read.round != number:
            continue
        column = used[read.owner]
        if plan.num_rounds:
            column = read.scratch_page - read.owner * plan.block
        used[read.owner] += 1
        shared = len(read.sequences) > 1
        names = "".join(map(_letter, read.sequences[:3]))
        names += "+" if len(read.sequences) > 3 else ""
        color = _SHARED if shared else _color(min(read.sequences))
        label = f"{read.physical_page} {names}"
        cells.append(_Cell(read.owner, column, label, color, 0, 1))
    return cells


def _write_cells(plan: PlanMap) -> list[_Cell]:
    cells = []
    used = [0] * plan.num_shards
    for write in plan.writes:
        start = write.first_slot / plan.page_size
        stop = (write.first_slot + write.num_slots) / plan.page_size
        label = f"{write.physical_page} {_letter(write.sequence)}"
        color = _color(write.sequence)
        cells.append(_Cell(write.owner, used[write.owner], label, color, start, stop))
        used[write.owner] += 1
    return cells


def _draw_cells(
    axes: "Axes", cells: list[_Cell], num_shards: int, columns: int
) -> None:
    rectangle = _optional("matplotlib.patches").Rectangle
    edge = 1.0 if columns <= _MOST_LABELLED else 0.3
    for cell in cells:
        corner = cell.column - 0.46, cell.owner - 0.42
        filled = corner[0] + 0.92 * cell.start, corner[1]
        size = 0.92 * (cell.stop - cell.start)
        axes.add_patch(rectangle(filled, size, 0.84, facecolor=cell.color, alpha=0.75))
        axes.add_patch(
            rectangle(
                corner,
                0.92,
                0.84,
                facecolor="none",
                edgecolor="#555555",
                linewidth=edge,
            )
        )
        if columns <= _MOST_LABELLED:
            axes.text(
                cell.column,
                cell.owner,
                cell.label,
                ha="center",
                va="center",
                fontsize=8,
            )
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_xticks([])
    _label_shards(axes, num_shards)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_padding(axes: "Axes", plan: PlanMap, number: int) -> None:
    """Dots where a shard's part of the scratch is padding."""
    if plan.block > _MOST_LABELLED:
        return
    axes.set_xticks(range(plan.block))
    taken = {(r.owner, r.scratch_page) for r in plan.reads if r.round == number}
    for owner, place in np.ndindex(plan.num_shards, plan.block):
        if (owner, owner * plan.block + place) not in taken:
            axes.plot(place, owner, ".", color="#999999", markersize=4)


def _label_shards(axes: "Axes", num_shards: int) -> None:
    axes.set_yticks(
        range(num_shards), [f"shard {owner}" for owner in range(num_shards)]
    )
    axes.set_ylim(num_shards - 0.5, -0.5)
    axes.tick_params(length=0, labelsize=8)
