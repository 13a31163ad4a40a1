r"""A chat in the terminal that computes each turn's new tokens and no more.

Every turn is a new request over the conversation so far; the prefix cache gives what
earlier turns computed, all but their last, partly filled page:

    turn 1   [ system | user | answer ]
    turn 2   [ system | user | ans : wer | user | answer ]
              reused, whole pages  : computed

The conversation is kept as token ids. An answer is never tokenised again, for other
ids of the same text would be another prefix.

    python examples/chat.py
    printf 'Hi!\nTell me more.\n' | python examples/chat.py --json
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import serve
import weights
from rich.console import Console

import jaxkv

# stands for an answer where the template is asked what comes after one
_ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}"


class Turn(NamedTuple):
    """What one turn said and cost."""

    text: str
    reused: int  # tokens found in the cache
    computed: int  # tokens computed, the answer's included
    pages_per_shard: list[int]  # pages that each shard keeps after it


class Chat:
    """One conversation with a model.

    Attributes:
      tokens: its ids so far, special tokens and all.
    """

    def __init__(
        self, server: serve.Server, checkpoint: weights.Checkpoint, system: str | None
    ):
        """Starts a conversation; the model's default system prompt where None."""
        self.tokens: list[int] = []
        self._server = server
        self._tokenizer = checkpoint.tokenizer
        self._eos_ids = checkpoint.eos_ids
        self._opening = [{"role": "system", "content": system}] if system else []

    def turn(
        self,
        message: str,
        max_new_tokens: int,
        on_text: Callable[[str], None] = lambda text: None,
        sampling: serve.Sampling = serve.GREEDY,
    ) -> Turn:
        """Answers a message, streaming the text to `on_text`.

        Raises:
          CapacityError: the conversation has become too long; it is as it was before.
        """
        tokens = self.tokens + self._ids_of(message)
        stream = self._tokenizer.stream()
        new_ids: list[int] = []
        pieces: list[str] = []

        def show(request_id: int, token: int, finished: bool) -> None:
            new_ids.append(token)
            piece = "" if token in self._eos_ids else stream.push(token)
            pieces.append(piece + stream.flush() if finished else piece)
            on_text(pieces[-1])

        before = self._server.cache.stats()
        self._server.submit(
            list(tokens), max_new_tokens, self._eos_ids, sampling, on_token=show
        )
        self._server.run()
        after = self._server.cache.stats()
        self.tokens = tokens + new_ids
        return Turn(
            text="".join(pieces),
            reused=after.hit_tokens - before.hit_tokens,
            computed=after.computed_tokens - before.computed_tokens,
            pages_per_shard=after.cached_pages.tolist(),
        )

    def _ids_of(self, message: str) -> list[int]:
        """What the template puts between the conversation so far and its answer."""
        user = {"role": "user", "content": message}
        if not self.tokens:
            return self._tokenizer.encode_chat([*self._opening, user])
        answer = {"role": "assistant", "content": _ANSWER}
        rendered = self._tokenizer.chat([*self._opening, user, answer, user])
        after_answer = rendered.partition(_ANSWER)[2]
        ids = self._tokenizer.backend.encode(after_answer, add_special_tokens=False).ids
        # an answer that ended by itself has brought its end-of-turn token
        ended = self.tokens[-1] in self._eos_ids and ids[0] == self.tokens[-1]
        return ids[1:] if ended else ids


def read_messages(console: Console) -> Iterator[str]:
    """Messages typed at a prompt, or the lines of stdin where that is no terminal."""
    while True:
        try:
            if sys.stdin.isatty():
                line = console.input("[bold cyan]>[/] ")
            else:
                line = next(sys.stdin).rstrip("\n")
        except (EOFError, KeyboardInterrupt, StopIteration):
            return
        if line.strip():
            yield line


def run(args: argparse.Namespace) -> None:
    """Talks until the input ends."""
    console = Console(highlight=False, quiet=args.json, soft_wrap=True)
    checkpoint = weights.load(args.model)
    with console.status("compiling"):
        server = serve.serve_llama(checkpoint, args, max_sequences=1)
    chat = Chat(server, checkpoint, args.system)
    for message in read_messages(console):
        try:
            turn = chat.turn(
                message,
                args.max_new_tokens,
                lambda text: console.print(text, end="", markup=False),
            )
        except jaxkv.CapacityError as error:
            sys.exit(f"chat.py: the conversation is too long: {error}")
        if args.json:
            print(json.dumps(turn._asdict()), flush=True)
        console.print(
            f"\n[dim]{turn.reused} tokens reused, {turn.computed} computed; pages a "
            f"shard: {' '.join(map(str, turn.pages_per_shard))}[/]\n"
        )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; an error ends the program with its message."""
    parser = argparse.ArgumentParser(description="Chat over a striped KV cache.")
    parser.add_argument("--system", help="system prompt; the model's own if not given")
    parser.add_argument("--json", action="store_true", help="one JSON line a turn")
    serve.add_options(parser, context=2048)
    try:
        run(parser.parse_args(argv))
    except (ValueError, OSError, weights.FetchError) as error:
        sys.exit(f"chat.py: {error}")


if __name__ == "__main__":
    main()
