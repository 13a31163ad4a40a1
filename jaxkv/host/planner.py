"""Turns a batch (which requests, how many new tokens each) into a StepPlan.

Prefill chunks and decode steps are the same thing, "extend by n". `shape` decides the
static sizes from the state before any page is drawn; `build` fills the arrays once the
chains are long enough. Both are pure functions of the request table, so that mirrored
hosts derive the same plan.

    batch order      s0 s0 s0 | s1 | s2 s2          request order, offsets cu_q_lens
    token blocks     [s0 s2 .] [s0 s1 .] ...        tokens sharded: by page owner

Where tokens are computed sharded, every shard computes the tokens of pages that it
owns, so its staged rows are its own and the pool write needs no exchange.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxkv import placement
from jaxkv.host.buckets import Buckets, StepShape, round_up
from jaxkv.host.request import Request, RequestTable
from jaxkv.host.step import ScratchMap
from jaxkv.plan import StepPlan

type Mode = Literal["auto", "assembled", "striped"]


def reads_striped(
    *, num_new_tokens: int, gathered_tokens: int, queries_per_kv_head: float
) -> bool:
    """The cost model of mode="auto": whether moving the queries is cheaper.

    A layer moves `gathered_tokens * Hk * (D + Dv)` elements if assembled and about
    `num_new_tokens * Hq * (D + Dv)` if striped (design: two ways to read), so the modes
    meet where `gathered_tokens = num_new_tokens * Hq / Hk`. The planner asks only for
    steps with a prefill chunk: a batch of decode steps is always striped, for its
    queries are few and building the gather's lists would cost the host more.

    Args:
      num_new_tokens: tokens that the step computes.
      gathered_tokens: prefix tokens that a gather would assemble, block padding
        included.
      queries_per_kv_head: query heads a KV head, Hq / Hk.

    >>> reads_striped(
    ...     num_new_tokens=512, gathered_tokens=1024, queries_per_kv_head=4)
    False
    >>> reads_striped(
    ...     num_new_tokens=512, gathered_tokens=4096, queries_per_kv_head=4)
    True
    """
    return gathered_tokens > num_new_tokens * queries_per_kv_head


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans steps over a request table.

    Attributes:
      table: the open requests.
      buckets: the declared static sizes.
      pages_per_shard: physical pages a shard, for the out-of-bounds padding row.
      num_token_blocks: 1 where every shard computes all tokens, else the shards.
      mode: how prefixes are read.
      queries_per_kv_head: query heads a KV head, for the cost model.
    """

    table: RequestTable
    buckets: Buckets
    pages_per_shard: int
    num_token_blocks: int
    mode: Mode
    queries_per_kv_head: float

    def shape(self, slots: np.ndarray, counts: np.ndarray) -> StepShape | None:
        """The static sizes of a step that extends int32 `slots` by int32 `counts`.

        Returns None where the step exceeds the largest bucket of tokens or sequences,
        or the scratch: the batch is to be deferred or made smaller.
        """
        table, buckets = self.table, self.buckets
        num_shards = table.num_shards
        num_sequences = round_up(slots.size, buckets.sequences)
        num_tokens = round_up(self._largest_block(slots, counts), self._block_sizes())
        prefix_pages = table.pages_needed(table.num_computed[slots])
        width = round_up(
            -(-int(prefix_pages.max()) // num_shards), buckets.table_widths
        )
        if num_sequences is None or num_tokens is None or width is None:
            return None
        padded = num_tokens * self.num_token_blocks
        head = (padded, num_sequences, width)
        decodes_only = int(counts.sum()) == slots.size
        if self.mode == "striped" or (self.mode == "auto" and decodes_only):
            return StepShape(*head, 0, 0, self.num_token_blocks)
        needed, rounds = self._gather_size(slots, prefix_pages)
        block = round_up(needed, buckets.blocks) if needed else 0
        striped = self.mode == "auto" and (
            rounds != 1
            or block is None
            or reads_striped(
                num_new_tokens=int(counts.sum()),
                gathered_tokens=num_shards * block * table.page_size,
                queries_per_kv_head=self.queries_per_kv_head,
            )
        )
        if striped:
            return StepShape(*head, 0, 0, self.num_token_blocks)
        rounds = round_up(rounds, buckets.rounds)
        if block is None or rounds is None:
            return None
        return StepShape(*head, rounds, block, self.num_token_blocks)

    def build(
        self, requests: Sequence[Request], counts: np.ndarray, shape: StepShape
    ) -> StepPlan:
        """Fills the plan of a step; the chains must already hold the new tokens.

        Args:
          requests: the batch, in its order.
          counts: new tokens of each, int32[len(requests)].
          shape: the step's static sizes, from `shape`.
        """
        table = self.table
        num_shards, page_size = table.num_shards, table.page_size
        num_real = len(requests)
        slots = np.fromiter((request.slot for request in requests), np.int32, num_real)
        prefix_lens = table.num_computed[slots]
        total = int(counts.sum())

        # request order: sequence by sequence, position by position
        cu_q_lens = np.full(shape.num_sequences + 1, total, np.int32)
        cu_q_lens[0] = 0
        np.cumsum(counts, out=cu_q_lens[1 : num_real + 1])
        seq = np.repeat(np.arange(num_real, dtype=np.int32), counts)
        index = np.arange(total, dtype=np.int32)
        position = index - cu_q_lens[seq] + prefix_lens[seq]
        if total == num_real:
            token = table.next_token[slots]
        else:
            token = np.concatenate(
                [
                    request._tokens[start : start + count]
                    for request, start, count in zip(
                        requests, prefix_lens.tolist(), counts.tolist(), strict=True
                    )
                ]
                or [np.zeros(0, np.int32)]
            )
        page = position // page_size
        owner = placement.chain_owner(page, table.base[slots][seq], num_shards)
        stored = table.stripes[owner, slots[seq], page // num_shards]
        by_owner = np.argsort(owner, kind="stable")
        owned = np.bincount(owner, minlength=num_shards)

        # rows of `tokens`: request order, or each owner's tokens in its own block
        row = index
        num_rows = np.array([total], np.int32)
        rows_per_block = shape.num_tokens // shape.num_token_blocks
        if shape.num_token_blocks > 1:
            num_rows = owned.astype(np.int32)
            row = np.empty(total, np.int32)
            row[by_owner] = _index_in_run(owned) + owner[by_owner] * rows_per_block
        last_rows = np.zeros(shape.num_sequences, np.int32)
        last_rows[:num_real] = row[cu_q_lens[1 : num_real + 1] - 1] if total else 0

        # what each owner writes, in request order
        staged = self._num_staged(shape)
        stage_rows = np.zeros((num_shards, staged), np.int32)
        write_rows = np.full(
            (num_shards, staged), self.pages_per_shard * page_size, np.int32
        )
        target = owner[by_owner], _index_in_run(owned)
        stage_rows[target] = row[by_owner] % rows_per_block
        write_rows[target] = (stored * page_size + position % page_size)[by_owner]
        stage_cu_lens = np.zeros((num_shards, shape.num_sequences + 1), np.int32)
        per_sequence = np.bincount(
            owner * shape.num_sequences + seq, minlength=stage_cu_lens[:, 1:].size
        )
        np.cumsum(
            per_sequence.reshape(num_shards, shape.num_sequences),
            axis=1,
            out=stage_cu_lens[:, 1:],
        )

        page_table, round_starts, send_pages = self._reads(slots, prefix_lens, shape)
        return StepPlan(
            tokens=_scatter(shape.num_tokens, row, token),
            positions=_scatter(shape.num_tokens, row, position),
            seq_ids=_scatter(shape.num_tokens, row, seq),
            num_rows=num_rows,
            cu_q_lens=cu_q_lens,
            chunk_rows=_scatter(shape.num_tokens, index, row),
            last_rows=last_rows,
            prefix_lens=_pad(prefix_lens, shape.num_sequences),
            bases=_pad(table.base[slots], shape.num_sequences),
            page_table=page_table,
            round_starts=round_starts,
            send_pages=send_pages,
            stage_rows=stage_rows,
            stage_cu_lens=stage_cu_lens,
            write_rows=write_rows,
        )

    def scratch_map(
        self, requests: Sequence[Request], counts: np.ndarray, shape: StepShape
    ) -> ScratchMap:
        """Where the step's scratch holds each loc; for steps of at most one round."""
        table = self.table
        page_size = table.page_size
        slots = np.array([request.slot for request in requests], np.int32)
        prefix_lens = table.num_computed[slots]
        pages = self.prefix_pages(slots)
        slots_of_page = np.zeros(table.num_shards * self.pages_per_shard, np.int32)
        locs = [np.zeros(0, np.int32)]
        for slot, prefix, count in zip(
            slots.tolist(), prefix_lens.tolist(), counts.tolist(), strict=True
        ):
            chain = table.chain(slot)
            held = chain[: -(-prefix // page_size)]
            filled = prefix - np.arange(held.size) * page_size
            filled = np.minimum(filled, page_size)
            slots_of_page[held] = np.maximum(slots_of_page[held], filled)
            position = np.arange(prefix, prefix + count)
            locs.append(
                placement.location(
                    chain[position // page_size], position % page_size, page_size
                )
            )
        return ScratchMap(
            num_shards=table.num_shards,
            page_size=page_size,
            block=shape.block,
            num_tokens=shape.num_tokens,
            prefix_pages=pages,
            prefix_slots=slots_of_page[pages],
            chunk_locs=np.concatenate(locs),
        )

    def prefix_pages(
        self, slots: np.ndarray, start: int = 0, stop: int | None = None
    ) -> np.ndarray:
        """Distinct prefix pages of a batch in owner-major order, int32 logical ids.

        A page that several requests share is gathered once. `start` and `stop` are page
        indices in each chain.
        """
        table = self.table
        totals = table.pages_needed(table.num_computed[slots]).tolist()
        chains = [
            table.chain(slot, total)[start:stop]
            for slot, total in zip(slots.tolist(), totals, strict=True)
        ]
        distinct = np.unique(np.concatenate([*chains, np.zeros(0, np.int32)]))
        owners = placement.owner(distinct, table.num_shards)
        return distinct[np.argsort(owners, kind="stable")].astype(np.int32)

    def _reads(
        self, slots: np.ndarray, prefix_lens: np.ndarray, shape: StepShape
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The page table, the rounds' starts (tokens) and the pages to send."""
        table = self.table
        num_shards = table.num_shards
        send_pages = np.full(
            (num_shards, shape.num_rounds, shape.block),
            placement.RESERVED_PAGE,
            np.int32,
        )
        width = shape.table_width
        if shape.num_rounds == 0:
            page_table = np.zeros((num_shards, shape.num_sequences, width), np.int32)
            stored = min(width, table.stripes.shape[2])
            page_table[:, : slots.size, :stored] = table.stripes[:, slots, :stored]
            return page_table, np.zeros(1, np.int32), send_pages
        totals = table.pages_needed(prefix_lens)
        step = self._pages_per_round(slots, totals)
        rounds = np.arange(shape.num_rounds + 1, dtype=np.int32)
        page_table = np.zeros(
            (shape.num_rounds, shape.num_sequences, num_shards * width), np.int32
        )
        for number in range(shape.num_rounds if shape.block else 0):
            start, stop = number * step, (number + 1) * step
            pages = self.prefix_pages(slots, start, stop)
            owners = placement.owner(pages, num_shards)
            within = _index_in_run(np.bincount(owners, minlength=num_shards))
            send_pages[owners, number, within] = placement.physical(pages, num_shards)
            scratch_page = np.zeros(num_shards * self.pages_per_shard, np.int32)
            scratch_page[pages] = owners * shape.block + within
            for sequence, slot in enumerate(slots.tolist()):
                chain = table.chain(slot, int(totals[sequence]))[start:stop]
                page_table[number, sequence, : chain.size] = scratch_page[chain]
        return page_table, rounds * np.int32(step * table.page_size), send_pages

    def _gather_size(
        self, slots: np.ndarray, prefix_pages: np.ndarray
    ) -> tuple[int, int]:
        """Pages that a shard sends in a round (the most of any owner), and rounds."""
        needed = self._most_owned(self.prefix_pages(slots))
        step = self._pages_per_round(slots, prefix_pages)
        if not step:
            return self.buckets.blocks[-1] + 1, 1  # no rotation of each fits
        rounds = max(1, -(-int(prefix_pages.max()) // step))
        return (needed if rounds == 1 else self.buckets.blocks[-1]), rounds

    def _pages_per_round(self, slots: np.ndarray, prefix_pages: np.ndarray) -> int:
        """Pages of each chain that one gather assembles: a whole number of rotations.

        All of them where the distinct pages fit the scratch at once; else an equal
        share for each sequence, so that no owner can exceed the block.
        """
        num_shards = self.table.num_shards
        largest = self.buckets.blocks[-1]
        if self._most_owned(self.prefix_pages(slots)) <= largest:
            rotations = max(1, -(-int(prefix_pages.max(initial=0)) // num_shards))
        else:
            rotations = largest // int((prefix_pages > 0).sum())
        return rotations * num_shards

    def _most_owned(self, pages: np.ndarray) -> int:
        owners = placement.owner(pages, self.table.num_shards)
        return int(np.bincount(owners, minlength=1).max())

    def _largest_block(self, slots: np.ndarray, counts: np.ndarray) -> int:
        """Tokens of the fullest token block."""
        if self.num_token_blocks == 1:
            return int(counts.sum())
        table = self.table
        shards = np.arange(table.num_shards)[:, None]
        starts = table.num_computed[slots]
        # a chain without pages starts on an owner that is not drawn yet: any base is
        # as good for the sum, and page owners shift with it, so take the worst
        empty = table.num_pages[slots] == 0
        base = np.where(empty, 0, table.base[slots])
        geometry = {"num_shards": table.num_shards, "page_size": table.page_size}
        owned = placement.tokens_per_owner(
            starts + counts, base, shards, **geometry
        ) - placement.tokens_per_owner(starts, base, shards, **geometry)
        fixed = owned[:, ~empty].sum(axis=1).max()
        return int(fixed + owned[:, empty].max(axis=0).sum())

    def _block_sizes(self) -> tuple[int, ...]:
        return tuple(
            -(-tokens // self.num_token_blocks) for tokens in self.buckets.tokens
        )

    def _num_staged(self, shape: StepShape) -> int:
        """Rows that a shard stages: the most that a batch of this shape has it own."""
        if shape.num_token_blocks > 1:
            return shape.num_tokens // shape.num_token_blocks
        table = self.table
        share = shape.num_tokens // table.num_shards
        return min(shape.num_tokens, share + shape.num_sequences * table.page_size)


def _index_in_run(run_lengths: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each of several runs laid end to end."""
    starts = np.cumsum(run_lengths) - run_lengths
    return np.arange(int(run_lengths.sum())) - np.repeat(starts, run_lengths)


def _scatter(size: int, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[rows] = values
    return padded


def _pad(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[: values.size] = values
    return padded
