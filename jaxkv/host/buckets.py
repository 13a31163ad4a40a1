"""The few static sizes that steps come in, and the one rule that rounds up to them.

Warm-up and run time call the same `round_up`, so a size that was warmed up is the size
that is run (cases A11: two formulas for one number recompiled at the first request).
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


def round_up(size: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest declared size that holds `size`; None over the largest.

    >>> [round_up(size, (1, 4, 16)) for size in (0, 1, 2, 16, 17)]
    [1, 1, 4, 16, None]
    """
    return next((declared for declared in sizes if size <= declared), None)


def geometric(smallest: int, largest: int, factor: int = 4) -> tuple[int, ...]:
    """Sizes from `smallest` to `largest`, each `factor` times the one before.

    >>> geometric(1, 100)
    (1, 4, 16, 64, 100)
    """
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


class StepShape(NamedTuple):
    """The static sizes of one step; see plan.py for the letters."""

    num_tokens: int  # T
    num_sequences: int  # S
    table_width: int  # W, pages a shard
    num_rounds: int  # R, 0 if striped
    block: int  # B, pages a shard a round
    num_token_blocks: int  # 1, or N where tokens are computed sharded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Declared sizes, ascending. A step takes the smallest that holds it in each.

    Attributes:
      tokens: tokens of a step; the last is the step's capacity. Where tokens are
        computed sharded, a shard's share is the bucket divided by the shards, rounded
        up, and a step fits only if no shard owns more than its share.
      sequences: sequences of a step.
      table_widths: pages a shard of one sequence's page table.
      blocks: pages a shard sends in one gather; the last bounds the scratch.
      rounds: gathers a layer.
    """

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    table_widths: tuple[int, ...]
    blocks: tuple[int, ...]
    rounds: tuple[int, ...] = (1,)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            sizes = getattr(self, field.name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(
                    f"{field.name}={sizes} must be ascending sizes of at least 1"
                )
        if self.rounds[0] != 1:
            raise ValueError(f"rounds={self.rounds} must start at 1")

    @classmethod
    def make(
        cls,
        *,
        num_shards: int,
        page_size: int,
        max_tokens: int,
        max_sequences: int,
        max_seq_len: int,
        max_prefix_tokens: int,
    ) -> "Buckets":
        """Geometric sizes up to the given bounds (tokens; sequences a step).

        Raises:
          ValueError: a bound is below 1, `max_tokens` is below `max_sequences`, or the
            scratch (`max_prefix_tokens`) is smaller than one rotation.
        """
        for name, bound in (
            ("num_shards", num_shards),
            ("page_size", page_size),
            ("max_tokens", max_tokens),
            ("max_sequences", max_sequences),
            ("max_seq_len", max_seq_len),
        ):
            if not isinstance(bound, int | np.integer):
                raise TypeError(f"{name}={bound!r} must be an int")
            if bound < 1:
                raise ValueError(f"{name}={bound} must be at least 1")
        if max_tokens < max_sequences:
            raise ValueError(
                f"{max_tokens=} must be at least {max_sequences=}: a decode step "
                "computes one token for each sequence"
            )
        rotation = num_shards * page_size
        if max_prefix_tokens < rotation:
            raise ValueError(
                f"{max_prefix_tokens=} must be at least one rotation of {rotation} "
                f"tokens ({num_shards=} x {page_size=})"
            )
        width = -(-max_seq_len // rotation)
        block = max_prefix_tokens // rotation
        rounds = -(-width // block)
        return cls(
            tokens=tuple(
                sorted({*geometric(1, max_sequences), *geometric(1, max_tokens)})
            ),
            sequences=geometric(1, max_sequences),
            table_widths=geometric(1, width),
            blocks=geometric(1, block),
            rounds=geometric(1, rounds, factor=2),
        )

    def shapes(
        self, *, num_token_blocks: int, striped: bool, assembled: bool
    ) -> Iterator[StepShape]:
        """Every shape that a step can take, for warm-up.

        Combinations that no batch can need (more sequences than tokens, a gather block
        below the widest table's share) are left out.
        """
        shares = (-(-tokens // num_token_blocks) for tokens in self.tokens)
        padded = dict.fromkeys(share * num_token_blocks for share in shares)
        for tokens, sequences, width in itertools.product(
            padded, self.sequences, self.table_widths
        ):
            if self._below(sequences, self.sequences) >= tokens:
                continue
            head, tail = (tokens, sequences, width), (num_token_blocks,)
            if striped:
                yield StepShape(*head, 0, 0, *tail)
            if not assembled:
                continue
            if width == self.table_widths[0]:
                yield StepShape(*head, 1, 0, *tail)  # no sequence has a prefix yet
            for rounds, block in itertools.product(self.rounds, self.blocks):
                if rounds > 1 and block < self.blocks[-1]:
                    continue  # a second round comes only once the scratch is full
                least = self._below(width, self.table_widths) + 1
                fewest = self._below(block, self.blocks) + 1
                if least <= rounds * block and fewest <= sequences * width:
                    yield StepShape(*head, rounds, block, *tail)

    @staticmethod
    def _below(size: int, sizes: tuple[int, ...]) -> int:
        """The declared size under `size`; 0 for the smallest."""
        index = sizes.index(size)
        return sizes[index - 1] if index else 0
