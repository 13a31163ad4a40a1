"""The whole contract between host and device: one step, as int32 arrays.

Sizes, mode and token layout are the arrays' shapes, so a jitted step compiles once a
shape and nothing else about a plan is static. Letters of the shape comments:

    T tokens of the step, padded      S sequences, padded     N shards of the group
    W table width (pages)             R gather rounds         B block (pages a shard
    M staged rows a shard                                       sends a round)

Mode: striped where R is 0, assembled otherwise. Token layout: `num_rows` has one entry
where every shard computes all T tokens, N entries where shard g computes rows
`g * T/N .. (g + 1) * T/N - 1`, which are the tokens of pages that it owns.

Padding is in bounds wherever it is read (token 0, position 0, sequence 0, page 0) and
out of bounds where it is written (`write_rows`, with mode="drop").
"""

from typing import Any, NamedTuple

type Int32Array = Any  # numpy on the host, jax on the device


class StepPlan(NamedTuple):
    """What a step computes, where its keys are read and its rows are written.

    Attributes:
      tokens: token ids, packed by block, then sequence, then position.
      positions: token index of each row in its request.
      seq_ids: sequence of each row.
      num_rows: rows of each token block that are not padding.
      cu_q_lens: offsets of each sequence's new tokens in request order.
      chunk_rows: row of `tokens` for each new token in request order.
      last_rows: row of each sequence's last new token (where its logits are).
      prefix_lens: tokens of each sequence whose KV was in the pool before the step.
      bases: rotation base of each sequence's chain.
      page_table: striped, [N, S, W]: physical pages of each shard, in local key order;
        assembled, [R, S, N * W]: scratch pages of each round, in position order.
      round_starts: token position at which each gather round starts; a last entry ends
        the last round.
      send_pages: physical pages that each shard sends in each round, ascending, padded
        with the reserved page.
      stage_rows: row, in its shard's tokens, of each row that the shard writes.
      stage_cu_lens: offsets of each sequence in a shard's staged rows.
      write_rows: pool row of each staged row; out of bounds for padding.
    """

    tokens: Int32Array  # i32[T]
    positions: Int32Array  # i32[T]
    seq_ids: Int32Array  # i32[T]
    num_rows: Int32Array  # i32[1] or i32[N]
    cu_q_lens: Int32Array  # i32[S + 1]
    chunk_rows: Int32Array  # i32[T]
    last_rows: Int32Array  # i32[S]
    prefix_lens: Int32Array  # i32[S]
    bases: Int32Array  # i32[S]
    page_table: Int32Array  # i32[N, S, W] or i32[R, S, N * W]
    round_starts: Int32Array  # i32[R + 1]
    send_pages: Int32Array  # i32[N, R, B]
    stage_rows: Int32Array  # i32[N, M]
    stage_cu_lens: Int32Array  # i32[N, S + 1]
    write_rows: Int32Array  # i32[N, M]

    @property
    def is_striped(self) -> bool:
        """Queries travel (striped) instead of keys (assembled); static."""
        return self.send_pages.shape[1] == 0

    @property
    def num_token_blocks(self) -> int:
        """1 where tokens are replicated over the shard group, else its size; static."""
        return self.num_rows.shape[0]

    @property
    def num_rounds(self) -> int:
        """Gathers a layer; 0 if striped; static."""
        return self.send_pages.shape[1]

    @property
    def block(self) -> int:
        """Pages that each shard sends in one gather; static."""
        return self.send_pages.shape[2]
