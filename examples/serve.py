"""Continuous batching over a striped KV cache: a serving loop to copy.

    waiting --open--> running --last token--> closed, its pages stay as prefixes
                      |    ^
               preempt v    | resume, before any new request
                     preempted

Each step extends every decoding request by one token and gives the rest of its tokens
to prompts, in order of admission. A request is opened only when the step has tokens
left for it, so that it finds what the requests before it have computed.

    python examples/serve.py                        a few questions to SmolLM2
    python examples/serve.py --requests FILE.jsonl  {"prompt": "Hi", "seed": 3} a line
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import generate
import jax
import jax.numpy as jnp
import numpy as np
import weights
from flax import nnx
from rich.console import Console
from rich.live import Live

import jaxkv

SYSTEM = "You are a helpful assistant that answers in one short sentence."
QUESTIONS = ["What is the capital of France?", "And of Italy?", "Why is the sky blue?"]
QUESTIONS += ["Who was Bach?", "What is a prime number?", "How far away is the Moon?"]

type Policy = Callable[[jaxkv.KVCache, Sequence["Job"]], int]
type Step = Callable[..., tuple[jax.Array, jaxkv.KVPool]]


class Sampling(NamedTuple):
    """How tokens are chosen: one request's numbers, or [S] arrays of a batch's."""

    temperature: Any = 0.0  # divides the logits; 0 is greedy
    top_k: Any = 0  # only the so many likeliest tokens; 0 for all
    top_p: Any = 1.0  # of these, only the likeliest that make up this probability
    seed: Any = 0  # with a token's position, all that its random draw depends on


GREEDY = Sampling()


@dataclasses.dataclass(eq=False)
class Job:
    """A request of the server; the cache's own `request` is None until admission."""

    id: int
    prompt: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling
    on_token: Callable[[int, int, bool], None] | None
    request: Any = None
    num_new: int = 0


def sample(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Chooses a token a sequence: f32[S, vocab] logits to i32[S].

    A token's noise depends on seed, position (i32[S]) and token id alone, so that a
    request's tokens are the same in every batch, and after a preemption.
    """
    vocab_size = logits.shape[1]
    greedy = jnp.argmax(logits, axis=-1)
    is_random = sampling.temperature > 0

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (vocab_size,))

    def draw() -> jax.Array:
        # by rank, likeliest first; equal logits keep the order of their ids
        ids = jnp.argsort(-logits, axis=-1)
        ranked = jnp.take_along_axis(logits, ids, axis=-1)
        ranked /= jnp.where(is_random, sampling.temperature, 1)[:, None]
        num_kept = jnp.where(sampling.top_k > 0, sampling.top_k, vocab_size)[:, None]
        ranked = jnp.where(jnp.arange(vocab_size)[None] < num_kept, ranked, -jnp.inf)
        probabilities = jax.nn.softmax(ranked, axis=-1)
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        ranked = jnp.where(likelier < sampling.top_p[:, None], ranked, -jnp.inf)
        gumbel = jax.vmap(noise)(sampling.seed, positions)
        best = jnp.argmax(ranked + jnp.take_along_axis(gumbel, ids, axis=-1), axis=-1)
        drawn = jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]
        return jnp.where(is_random, drawn, greedy)

    # a greedy batch has no use for sorting the vocabulary
    return jax.lax.cond(is_random.any(), draw, lambda: greedy)


def make_step(forward: Step, compiler_options: dict[str, Any] | None = None) -> Step:
    """The jitted step of a decoder: `forward`, then `sample`. It donates the pool.

    `forward(params, pool, plan)` gives logits f32[S, vocab] of each sequence's last new
    token, and the new pool.
    """

    def step(params, pool, plan, sampling, positions):
        logits, pool = forward(params, pool, plan)
        return sample(logits, sampling, positions), pool

    return jax.jit(step, donate_argnames="pool", compiler_options=compiler_options)


def first_come(cache: jaxkv.KVCache, waiting: Sequence[Job]) -> int:
    """Admits in order of arrival."""
    return 0


def longest_prefix(cache: jaxkv.KVCache, waiting: Sequence[Job]) -> int:
    """Admits whoever finds most of its prompt cached; ties by arrival.

    A steady stream of well-cached prompts may starve others.
    """
    return int(np.argmax([cache.num_cached(job.prompt) for job in waiting]))


POLICIES = {"longest-prefix": longest_prefix, "first-come": first_come}


class Server:
    """Runs many requests as one changing batch, over a cache of its own.

    `waiting` is in order of arrival, `preempted` and `running` of first admission.
    """

    def __init__(
        self,
        cache: jaxkv.KVCache,
        step: Step,
        params: Any,
        policy: Policy = longest_prefix,
        token_budget: int | None = None,
    ):
        """Starts idle over an idle cache, whose largest buckets bound each step.

        `step` is of `make_step`, `params` its first argument; `token_budget` counts the
        new tokens of one step, the largest bucket where None.
        """
        self._token_budget = token_budget or cache.buckets.tokens[-1]
        self._max_running = min(cache.buckets.sequences[-1], self._token_budget)
        self.cache = cache
        self.waiting: list[Job] = []
        self.preempted: list[Job] = []
        self.running: list[Job] = []
        self._step = step
        self._params = params
        self.policy = policy
        self._next_id = 0

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended."""
        return not (self.waiting or self.preempted or self.running)

    def warm_up(self) -> None:
        """Compiles every shape that a step can take; nothing compiles afterwards."""
        for step in self.cache.warmup_steps():
            self._run(step, [])

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_ids: Iterable[int] = (),
        sampling: Sampling = GREEDY,
        on_token: Callable[[int, int, bool], None] | None = None,
    ) -> int:
        """Queues a request over a prompt's token ids and returns the request's id.

        It ends with `max_new_tokens`, or with one of `stop_ids` as its last. `on_token`
        is called with (request id, token, whether it is the last). ValueError: a number
        is out of its range; CapacityError: no cache could hold all the tokens.
        """
        if len(prompt) < 1 or max_new_tokens < 1:
            raise ValueError(f"{len(prompt)=} and {max_new_tokens=} must be at least 1")
        temperature, top_k, top_p, seed = sampling
        in_range = 0 <= temperature < np.inf and 0 < top_p <= 1
        if not in_range or not 0 <= top_k < 2**31 or not 0 <= seed < 2**32:
            raise ValueError(f"{sampling} has a number out of its range")
        # the last token ends the request, and is never computed
        total = len(prompt) + max_new_tokens - 1
        if total > (limit := self.cache.max_seq_len):
            raise jaxkv.CapacityError(f"{total=} tokens exceed a request's {limit}")
        stops, self._next_id = frozenset(stop_ids), self._next_id + 1
        job = Job(self._next_id - 1, prompt, max_new_tokens, stops, sampling, on_token)
        self.waiting.append(job)
        return job.id

    def abort(self, request_id: int) -> bool:
        """Ends a request without another token; False if it has ended already."""
        for queue in (self.waiting, self.preempted, self.running):
            for job in [job for job in queue if job.id == request_id]:
                queue.remove(job)
                if job.request:
                    self.cache.abort(job.request)
                return True
        return False

    def step(self) -> None:
        """Runs one step over as many requests as fit; calls back with their tokens.

        Callbacks may submit and abort. One that raises ends the call, and the step's
        later ones are not made; the server can go on.
        """
        if self.is_idle:
            return
        batch = self._next_batch()
        while not (step := self.cache.plan([(job.request, new) for job, new in batch])):
            victim = self._preempt()
            batch = [(job, count) for job, count in batch if job is not victim]
        jobs = [job for job, _ in batch]
        news = []
        for job, token in zip(jobs, self._run(step, jobs).tolist(), strict=False):
            if job.request.num_uncomputed:
                continue  # in the middle of its prompt
            job.num_new += 1
            finished = job.num_new == job.max_new_tokens or token in job.stop_ids
            if finished:
                self.running.remove(job)
                self.cache.close(job.request)
            else:
                self.cache.append(job.request, token)
            news.append((job, token, finished))
        for job, token, finished in news:
            aborted = job.request.is_closed and not finished
            if job.on_token is not None and not aborted:
                job.on_token(job.id, token, finished)

    def run(self) -> None:
        """Steps until every request has ended."""
        while not self.is_idle:
            self.step()

    def _next_batch(self) -> list[tuple[Job, int]]:
        """Decodes first; what is left of the budget goes to prompts, old and new."""
        batch = [(job, 1) for job in self.running if job.request.num_uncomputed == 1]
        prompts = [job for job in self.running if job.request.num_uncomputed > 1]
        left = self._token_budget - len(batch)
        while left and (job := prompts.pop(0) if prompts else self._admit()):
            count = min(job.request.num_uncomputed, left)
            batch.append((job, count))
            left -= count
        if not batch:
            raise RuntimeError("an idle cache has no room for the next request")
        return batch

    def _admit(self) -> Job | None:
        """Brings in the next job, if there is one and the cache has room for it."""
        if len(self.running) == self._max_running:
            return None
        if self.preempted:
            if not self.cache.resume(self.preempted[0].request):
                return None
            job = self.preempted.pop(0)
        elif self.waiting:
            index = self.policy(self.cache, self.waiting)
            job = self.waiting[index]
            job.request = self.cache.open(job.prompt)
            if job.request is None:
                return None
            del self.waiting[index]
        else:
            return None
        self.running.append(job)
        return job

    def _preempt(self) -> Job:
        """Drops the pages of whoever was admitted last; the first always goes on."""
        if len(self.running) == 1:
            raise RuntimeError(f"{self.running[0].request} fits no step even alone")
        victim = self.running.pop()
        self.cache.preempt(victim.request)
        self.preempted.insert(0, victim)
        return victim

    def _run(self, step: jaxkv.Step, jobs: Sequence[Job]) -> np.ndarray:
        """Runs and commits a planned step; the sampled tokens, i32[S]."""
        num_padding = step.shape.num_sequences - len(jobs)
        rows = [(*job.sampling, job.request.num_tokens) for job in jobs]
        columns = zip(*rows, *[(*GREEDY, 0)] * num_padding, strict=True)
        dtypes = (np.float32, np.int32, np.float32, np.uint32, np.int32)
        *sampling, positions = map(np.array, columns, dtypes)
        tokens, pool = self._step(
            self._params, self.cache.pool, step.plan, Sampling(*sampling), positions
        )
        self.cache.commit(step, pool)
        return np.asarray(tokens)


def add_options(parser: argparse.ArgumentParser, *, context: int) -> None:
    """The options of every program with a server."""
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, or a Hugging Face folder")
    add("--devices", type=int, default=8, help="devices of the mesh")
    add("--page-size", type=int, default=16, help="tokens a page")
    add("--chunk", type=int, default=32, help="prompt tokens of one step, at least")
    add("--context", type=int, default=context, help="tokens that the cache holds")
    add("--max-new-tokens", type=int, default=64, help="tokens of one answer, at most")


def serve_llama(
    checkpoint: weights.Checkpoint, args: argparse.Namespace, max_sequences: int
) -> Server:
    """A warm server of a Llama checkpoint; few buckets, so that warm-up is short."""
    model = generate.place_model(checkpoint, generate.make_mesh(args.devices, 1))
    width = -(-args.context // (args.devices * args.page_size))
    cache = jaxkv.KVCache(
        model.config.cache_spec(args.page_size, 1 + width, "float32"),
        model.mesh,
        mode="striped",
        buckets=jaxkv.Buckets(
            tokens=(max_sequences, max_sequences + args.chunk),
            sequences=(max_sequences,),
            table_widths=(width,),
            blocks=(1,),
        ),
    )
    graph, state = nnx.split(model)

    def forward(state, pool, plan):
        return nnx.merge(graph, state)(pool, plan)

    server = Server(cache, make_step(forward), state)
    server.warm_up()
    return server


def read_requests(path: Path, max_new_tokens: int) -> Iterator[tuple[Any, ...]]:
    """Prompt, length and sampling of each line; ValueError with the number of a bad."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            fields = {"max_new_tokens": max_new_tokens, **json.loads(line)}
            yield fields.pop("prompt"), fields.pop("max_new_tokens"), Sampling(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: {error!r}") from None


def run(args: argparse.Namespace) -> None:
    """Serves the questions, streams the answers, and says what the cache did."""
    prompts = args.prompt or QUESTIONS
    requests = [(prompt, args.max_new_tokens, GREEDY) for prompt in prompts]
    if args.requests:
        requests = list(read_requests(args.requests, args.max_new_tokens))
    checkpoint = weights.load(args.model)
    tokenizer, eos_ids = checkpoint.tokenizer, checkpoint.eos_ids
    server = serve_llama(checkpoint, args, args.max_sequences)
    server.policy = POLICIES[args.policy]
    streams = [tokenizer.stream() for _ in requests]
    texts = [f"> {prompt}\n" for prompt, _, _ in requests]

    def show(index: int, token: int, finished: bool) -> None:
        if token not in eos_ids:
            texts[index] += streams[index].push(token)
        live.update("\n\n".join(texts))

    with Live(console=Console(markup=False, highlight=False)) as live:
        for prompt, max_new_tokens, sampling in requests:
            user = {"role": "user", "content": prompt}
            ids = tokenizer.encode_chat([{"role": "system", "content": SYSTEM}, user])
            server.submit(ids, max_new_tokens, eos_ids, sampling, show)
        server.run()
    stats = server.cache.stats()
    print(
        f"\n{stats.hit_tokens} tokens reused, {stats.computed_tokens} computed, "
        f"{stats.preemptions} preemptions, {stats.evicted_tokens} tokens evicted"
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; an error ends the program with its message."""
    parser = argparse.ArgumentParser(description="Answer many questions at once.")
    add = parser.add_argument
    add("--prompt", action="append", help="may be given many times")
    add("--requests", type=Path, help="a file, a JSON object a line")
    add("--policy", choices=POLICIES, default="longest-prefix")
    add("--max-sequences", type=int, default=4, help="of one step")
    add_options(parser, context=1024)
    try:
        run(parser.parse_args(argv))
    except (ValueError, OSError, jaxkv.JaxkvError, weights.FetchError) as error:
        sys.exit(f"serve.py: {error}")


if __name__ == "__main__":
    main()
