"""Generates text from prompts with a KV cache striped over a mesh.

    python examples/generate.py                      SmolLM2 on 8 simulated devices
    python examples/generate.py --prompt "Once" --devices 4 --mode striped --page-size 4

On a machine with GPUs the same command uses `--devices` of them.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import weights
from decoders.llama import Llama, LlamaConfig
from flax import nnx
from jax.sharding import AxisType, Mesh

import jaxkv

DEFAULT_PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "The three primary colours are",
]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; an error ends the program with its message."""
    parser = argparse.ArgumentParser(
        description="Generate text from a KV cache striped over a mesh of devices."
    )
    add_prompt_options(parser)
    parser.add_argument("--devices", type=int, default=8, help="devices of the mesh")
    parser.add_argument(
        "--head-devices",
        type=int,
        default=1,
        help="of these, devices that split the KV heads; the rest stripe the pages",
    )
    parser.add_argument(
        "--mode", choices=["assembled", "striped", "auto"], default="auto"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page")
    parser.add_argument(
        "--chunk", type=int, default=128, help="tokens a step while prefilling"
    )
    parser.add_argument(
        "--shard-tokens",
        action="store_true",
        help="each device computes the tokens it will store, a 1/N share",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args(argv)
    for name in ("devices", "head_devices", "page_size", "chunk", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.devices % args.head_devices:
        parser.error(
            f"--head-devices {args.head_devices} does not divide "
            f"--devices {args.devices}"
        )
    return args


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """The options that name a model, its prompts and the form of the output."""
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, or a Hugging Face folder"
    )
    parser.add_argument("--prompt", action="append", help="may be given many times")
    parser.add_argument("--prompt-file", type=Path, help="a JSON list of prompts")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="wrap each prompt in the chat template, and stop at the answer's end",
    )
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON line a prompt, no more"
    )
    parser.add_argument(
        "--batch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="all prompts as one batch, or one after another",
    )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of `--prompt` and `--prompt-file`, or the default ones.

    Raises:
      ValueError: the file is no JSON list of strings.
    """
    prompts = list(args.prompt or [])
    if args.prompt_file:
        listed = json.loads(args.prompt_file.read_text())
        if not isinstance(listed, list) or not all(
            isinstance(prompt, str) for prompt in listed
        ):
            raise ValueError(f"{args.prompt_file} is not a JSON list of strings")
        prompts += listed
    return prompts or DEFAULT_PROMPTS


def make_mesh(num_devices: int, head_devices: int) -> Mesh:
    """A kv x heads mesh of real devices, or of simulated ones where there is no GPU.

    Raises:
      ValueError: the machine has fewer accelerators than asked for.
    """
    if jax.config.jax_num_cpu_devices < num_devices:
        # where jax is in use already, take the devices that there are
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices()
    if num_devices > len(devices):
        raise ValueError(
            f"--devices {num_devices} exceeds the {len(devices)} {devices[0].platform} "
            "devices of this machine"
        )
    return jax.make_mesh(
        (num_devices // head_devices, head_devices),
        ("kv", "heads"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[:num_devices],
    )


class Generator:
    """A model, a cache for it, and the jitted greedy step."""

    def __init__(self, model: Llama, cache: jaxkv.KVCache, chunk: int):
        self.cache = cache
        self.chunk = chunk
        self.pages_held: list[list[int]] = []
        graph, self._state = nnx.split(model)

        @functools.partial(jax.jit, donate_argnames="pool")
        def step(state, pool, plan):
            logits, pool = nnx.merge(graph, state)(
                pool, plan, attention=cache.attention
            )
            return jnp.argmax(logits, axis=-1), pool

        self._step: Callable[..., Any] = step

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        eos_ids: tuple[int, ...] = (),
    ) -> Iterator[tuple[int, int]]:
        """Greedy continuation of prompts as one batch: (prompt index, token) pairs.

        Ends at `max_new_tokens` or after one of `eos_ids`. Afterwards `pages_held` has
        the pages a shard of each request.
        """
        requests = [self._open(prompt) for prompt in prompts]
        running = dict(enumerate(requests))
        budget = dict.fromkeys(running, max_new_tokens)
        while running:
            batch = self._next_batch(running)
            step = self.cache.plan([(running[index], count) for index, count in batch])
            if step is None:
                raise RuntimeError("the cache has no room for the next step")
            tokens, pool = self._step(self._state, self.cache.pool, step.plan)
            self.cache.commit(step, pool)
            for (index, _), token in zip(batch, np.asarray(tokens), strict=False):
                if running[index].num_uncomputed:
                    continue  # in the middle of its prompt
                yield index, int(token)
                budget[index] -= 1
                if not budget[index] or token in eos_ids:
                    del running[index]
                else:
                    self.cache.append(running[index], int(token))
        shards = np.arange(self.cache.num_shards)
        self.pages_held = []
        for request in requests:
            owners = request.pages() % self.cache.num_shards
            self.pages_held.append((owners[:, None] == shards).sum(axis=0).tolist())
            self.cache.close(request)

    def _open(self, prompt: list[int]) -> jaxkv.Request:
        request = self.cache.open(prompt)
        if request is None:
            raise RuntimeError(f"the cache has no room for {len(prompt)} tokens")
        return request

    def _next_batch(self, running: dict[int, jaxkv.Request]) -> list[tuple[int, int]]:
        """Shares the step's tokens: every request gets one, prompts get the rest."""
        left = self.chunk - len(running)
        batch = []
        for index, request in running.items():
            count = 1 + min(request.num_uncomputed - 1, max(left, 0))
            left -= count - 1
            batch.append((index, count))
        return batch


def place_model(
    checkpoint: weights.Checkpoint, mesh: Mesh, dtype: str = "float32"
) -> Llama:
    """The checkpoint's decoder on a kv x heads mesh."""
    config = LlamaConfig.from_dict(checkpoint.config)
    return Llama(config, checkpoint.tensors, mesh, "heads", jnp.dtype(dtype))


def build(
    args: argparse.Namespace, model: Llama, num_sequences: int, num_tokens: int
) -> Generator:
    """A generator whose cache holds so many sequences of so many tokens."""
    config, mesh = model.config, model.mesh
    num_shards = mesh.shape["kv"]
    # each shard holds its share of every chain, rounded up to a page, and page 0
    pages_per_chain = -(-num_tokens // (num_shards * args.page_size))
    chunk = max(args.chunk, num_sequences)
    cache = jaxkv.KVCache(
        config.cache_spec(
            args.page_size, 1 + num_sequences * pages_per_chain, args.dtype
        ),
        mesh,
        head_axis="heads",
        mode=args.mode,
        shard_tokens=args.shard_tokens,
        # a step's tokens may all lie on one shard's pages: let that shard take them
        max_tokens=chunk * (num_shards if args.shard_tokens else 1),
        max_sequences=num_sequences,
        max_seq_len=num_tokens,
        query_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
    )
    return Generator(model, cache, chunk)


def run(args: argparse.Namespace) -> None:
    """Generates, streams the text, and says what the cache held."""
    prompts = read_prompts(args)
    checkpoint = weights.load(args.model)
    tokenizer = checkpoint.tokenizer
    if args.chat:
        prompt_ids = [
            tokenizer.encode_chat([{"role": "user", "content": prompt}])
            for prompt in prompts
        ]
    else:
        prompt_ids = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if not ids:
            raise ValueError(f"{prompt=} has no tokens")
    batches = [prompt_ids] if args.batch else [[ids] for ids in prompt_ids]
    num_tokens = max(map(len, prompt_ids)) + args.max_new_tokens
    mesh = make_mesh(args.devices, args.head_devices)
    model = place_model(checkpoint, mesh, args.dtype)
    generator = build(args, model, len(batches[0]), num_tokens)
    eos_ids = checkpoint.eos_ids if args.chat else ()
    first = 0
    for batch in batches:
        printer = Printer(prompts[first : first + len(batch)], batch, args, tokenizer)
        for index, token in generator.generate(batch, args.max_new_tokens, eos_ids):
            printer.push(index, token)
        printer.finish(generator)
        first += len(batch)


class Printer:
    """Streams a batch's text to stdout, prompt by prompt, or prints JSON lines.

    The first unfinished prompt streams; what the others have is printed at their turn.
    """

    def __init__(self, prompts, prompt_ids, args, tokenizer):
        self._prompts = prompts
        self._prompt_ids = prompt_ids
        self._args = args
        self._tokenizer = tokenizer
        self._streams = [tokenizer.stream() for _ in prompts]
        self._pending = [f"\n> {prompt}" for prompt in prompts]
        self._new_ids: list[list[int]] = [[] for _ in prompts]
        self._turn = 0

    def push(self, index: int, token: int) -> None:
        """Takes one prompt's next token."""
        self._new_ids[index].append(token)
        self._pending[index] += self._streams[index].push(token)
        if index == self._turn and not self._args.json:
            self._print(index)

    def finish(self, generator: Generator) -> None:
        """Prints what is left: the later prompts' text and the cache's use, or JSON."""
        for index, stream in enumerate(self._streams):
            self._pending[index] += stream.flush() + "\n"
            if not self._args.json:
                self._print(index)
        if not self._args.json:
            print(f"\n{describe_use(generator)}")
            return
        for ids, new_ids, pages in zip(
            self._prompt_ids, self._new_ids, generator.pages_held, strict=True
        ):
            line = {
                "prompt_ids": ids,
                "new_ids": new_ids,
                "text": self._tokenizer.decode(new_ids),
                "mode": self._args.mode,
                "num_shards": generator.cache.num_shards,
                "pages_per_shard": pages,
            }
            print(json.dumps(line), flush=True)

    def _print(self, index: int) -> None:
        print(self._pending[index], end="", flush=True)
        self._pending[index] = ""
        self._turn = index


def describe_use(generator: Generator) -> str:
    """What the last batch held in the cache, against a replicated cache."""
    cache = generator.cache
    held = np.sum(generator.pages_held, axis=0)
    heads = cache.group.head_shards
    page_mib = cache.spec.page_bytes / heads / 2**20
    devices = f"{cache.num_shards} shards"
    if heads > 1:
        devices += f" x {heads} head devices"
    return (
        f"cache: {held.sum()} pages of {cache.spec.page_size} tokens over {devices}, "
        f"by shard {held.tolist()}\n"
        f"a device holds at most {held.max()} pages ({held.max() * page_mib:.2f} MiB); "
        f"a replicated cache would hold {held.sum()} ({held.sum() * page_mib:.2f} MiB) "
        f"on each"
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    args = parse_args(argv)
    try:
        run(args)
    except (ValueError, FileNotFoundError, weights.FetchError) as error:
        sys.exit(f"generate.py: {error}")


if __name__ == "__main__":
    main()
