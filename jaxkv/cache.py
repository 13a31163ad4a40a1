"""The composition: one mutable object that holds the pool and the host side.

    request = cache.open(tokens)                 None: no room now
    step = cache.plan([(request, 128)])          None: the same, or too large a batch
    out, pool = forward(params, cache.pool, step.plan)         the caller's jitted step
    cache.commit(step, pool)
    cache.append(request, token)
    cache.close(request)

A step that is planned and never committed computes nothing, and the pages drawn for it
stay with their requests: plan it again, or run the same step again. Whatever replaces
the pool makes older steps stale.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxkv.device.attention import get_backend
from jaxkv.device.compilations import CompilationCounter
from jaxkv.device.layers import StagedRows
from jaxkv.device.packing import pack_plan
from jaxkv.device.pool import KVPool, copy_pages, create_pool, write_rows
from jaxkv.device.regions import ShardGroup
from jaxkv.errors import CapacityError, ClosedRequestError, StalePlanError
from jaxkv.host.buckets import Buckets, StepShape, round_up
from jaxkv.host.chains import CacheStats, Chains
from jaxkv.host.events import EventSink
from jaxkv.host.eviction import Policy, lru
from jaxkv.host.namespace import DEFAULT_NAMESPACE, Namespace
from jaxkv.host.planner import Mode, Planner
from jaxkv.host.request import Request
from jaxkv.host.step import Step
from jaxkv.spec import CacheSpec


class KVCache:
    """A KV cache stored once over a shard group, for a serving loop to hold.

    Attributes:
      spec: what a token stores.
      group: the mesh and axes that the pool is split over.
      buckets: the static sizes that steps come in.
      attention: name of the attention backend, for `scan_layers`.
    """

    def __init__(
        self,
        spec: CacheSpec,
        mesh: jax.sharding.Mesh,
        axis: str = "kv",
        head_axis: str | None = None,
        *,
        mode: Mode = "auto",
        shard_tokens: bool = False,
        max_tokens: int = 512,
        max_sequences: int = 16,
        max_seq_len: int | None = None,
        max_prefix_tokens: int | None = None,
        buckets: Buckets | None = None,
        query_heads: int | None = None,
        vocab_size: int | None = None,
        attention: str = "auto",
        keep_prefixes: bool = True,
        reserve_pages: int = 0,
        policy: Policy = lru,
        event_sink: EventSink | None = None,
    ):
        """Makes the pool on its devices.

        Args:
          spec: what a token stores; `pages_per_shard` of it is each shard's capacity.
          mesh: the mesh, Auto or Explicit axes.
          axis: the mesh axis over which pages are striped.
          head_axis: the mesh axis that splits KV heads, or None.
          mode: how prefixes are read: "assembled" (keys travel), "striped" (queries
            travel) or "auto" (the cheaper one for each step, `host/planner.py`).
          shard_tokens: each shard computes the tokens of the pages it will own, a
            1/N share, instead of every shard computing all.
          max_tokens: new tokens of one step, all its sequences together. With
            `shard_tokens` a shard takes `max_tokens / N` of them, and a step in which
            one shard owns more is deferred: leave room for its whole chunk there.
          max_sequences: sequences of one step.
          max_seq_len: tokens of one request; the pool's capacity where None.
          max_prefix_tokens: tokens that one gather may assemble (the scratch);
            enough for any batch where None. A longer prefix takes several gathers a
            layer, a batch with more is deferred or, in mode "auto", read striped.
          buckets: the static sizes; made from the bounds above where None.
          query_heads: query heads of the model, for the cost model of "auto"; 4 a KV
            head where None.
          vocab_size: where given, token ids are checked against it.
          attention: name of the attention backend.
          keep_prefixes: whether computed pages stay for requests to come.
          reserve_pages: pages beyond its prompt that admission keeps for each request.
          policy: what the prefix cache evicts first (`jaxkv.host.eviction`).
          event_sink: called with each KV event (`jaxkv.host.events`).

        Raises:
          ValueError: a size, axis or name cannot be served; the message says which.
        """
        if mode not in ("auto", "assembled", "striped"):
            raise ValueError(f"{mode=} is not one of auto, assembled, striped")
        get_backend(attention)
        for name, size in (
            ("max_seq_len", max_seq_len),
            ("query_heads", query_heads),
            ("vocab_size", vocab_size),
        ):
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if query_heads is not None and query_heads % spec.kv.num_kv_heads:
            raise ValueError(
                f"{query_heads=} is not a multiple of {spec.kv.num_kv_heads} KV heads"
            )
        self.spec = spec
        self.group = ShardGroup(mesh, axis, head_axis)
        self.attention = attention
        self.vocab_size = vocab_size
        self._pool = create_pool(spec, self.group)
        num_shards = self.group.num_shards
        capacity = num_shards * spec.usable_pages * spec.page_size
        if max_seq_len is not None and max_seq_len > capacity:
            raise ValueError(
                f"{max_seq_len=} tokens exceeds the pool's capacity of {capacity}"
            )
        self.max_seq_len = max_seq_len or capacity
        rotation = num_shards * spec.page_size
        if max_prefix_tokens is None:
            longest = -(-self.max_seq_len // rotation) * rotation
            max_prefix_tokens = min(capacity, max_sequences * longest)
        if buckets is None:
            buckets = Buckets.make(
                num_shards=num_shards,
                page_size=spec.page_size,
                max_tokens=max_tokens,
                max_sequences=max_sequences,
                max_seq_len=self.max_seq_len,
                max_prefix_tokens=max_prefix_tokens,
            )
        self.buckets = buckets
        self.max_seq_len = min(self.max_seq_len, buckets.table_widths[-1] * rotation)
        self._chains = Chains(
            num_shards,
            spec.pages_per_shard,
            spec.page_size,
            reserve_pages=reserve_pages,
            keep_prefixes=keep_prefixes,
            policy=policy,
            sink=event_sink,
        )
        self._table = self._chains.table
        self._planner = Planner(
            table=self._table,
            buckets=buckets,
            pages_per_shard=spec.pages_per_shard,
            num_token_blocks=num_shards if shard_tokens else 1,
            mode=mode,
            queries_per_kv_head=(
                4.0 if query_heads is None else query_heads / spec.kv.num_kv_heads
            ),
        )
        self._version = 0
        self._compilations = CompilationCounter()
        self._copy_pages = jax.jit(copy_pages, donate_argnums=0)
        self._write_rows = jax.jit(write_rows, donate_argnums=0)

    @property
    def pool(self) -> KVPool:
        """The current pool; donate it to the jitted step and commit the new one.

        Raises:
          StalePlanError: the pool was donated to a step that then failed, so that its
            buffers are gone (steps built on `stage_scan` do not have this fault).
        """
        if self._pool.k.is_deleted():
            raise StalePlanError(
                "the pool was donated to a step whose new pool was never committed"
            )
        return self._pool

    @property
    def num_shards(self) -> int:
        """Shards of the group (N)."""
        return self.group.num_shards

    @property
    def requests(self) -> tuple[Request, ...]:
        """The open requests, in order of opening."""
        return tuple(self._table.requests.values())

    def available_pages(self) -> int:
        """Logical pages that any chain can still draw, by evicting if need be."""
        return self._chains.available_pages()

    def pages_per_shard(self) -> list[int]:
        """Pages that each shard holds for open requests."""
        stats = self._chains.stats()
        return (stats.private_pages + stats.protected_pages).tolist()

    def open(
        self,
        tokens: Sequence[int] | np.ndarray,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> Request | None:
        """Starts a request over a prompt; what is cached of it counts as computed.

        Args:
          tokens: the prompt's token ids; at least one. The last is never taken from
            the cache: its logits have to be computed.
          namespace: whose prefixes it may read and add to (tenant, adapter, images).

        Returns:
          The request; None where the pool has no room for it now: wait for another to
          end, or preempt one.

        Raises:
          CapacityError: the prompt could not fit even into an empty cache.
          ValueError, TypeError: a token is no id, or there is none.
        """
        checked = self._checked_tokens(tokens)
        if not checked.size:
            raise ValueError("a request needs at least one token")
        self._check_length(checked.size)
        return self._chains.open(checked, namespace)

    def num_cached(
        self,
        tokens: Sequence[int] | np.ndarray,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> int:
        """Tokens of a prompt that `open` would find cached now; changes nothing."""
        checked = self._checked_tokens(tokens)
        return self._chains.prefix_cache.match(checked, namespace).num_tokens

    def append(
        self, request: Request, tokens: int | Sequence[int] | np.ndarray
    ) -> None:
        """Adds sampled or given tokens at a request's end; later steps compute them.

        Raises:
          CapacityError: the request would outgrow an empty cache; nothing is added.
          ClosedRequestError: the request is closed.
        """
        self._check_open(request)
        checked = self._checked_tokens(np.atleast_1d(np.asarray(tokens)))
        self._check_length(request.num_tokens + checked.size)
        self._table.append(request, checked)

    def plan(self, batch: Sequence[tuple[Request, int]]) -> Step | None:
        """Plans one step that extends each request by its next so many tokens.

        Pages for the new tokens are drawn here, for the whole batch or not at all;
        they stay with their requests if the step is dropped.

        Args:
          batch: (request, new tokens) pairs; prefill chunks and decode steps alike.

        Returns:
          The step; None where pages are short now, or where the batch exceeds the
          step's capacity (tokens, sequences, scratch): plan a smaller one.

        Raises:
          TypeError: a request or a count of tokens is none.
          ValueError: the batch is empty, names a request twice, or asks for no tokens
            or for more than a request has.
          ClosedRequestError: a request is closed.
        """
        requests = tuple(request for request, _ in batch)
        if not requests:
            raise ValueError("a step needs at least one request")
        for request in requests:
            self._check_running(request)
        given = np.array([count for _, count in batch])
        if not np.issubdtype(given.dtype, np.integer):
            raise TypeError(f"new tokens must be ints, got {given.dtype}")
        counts = given.astype(np.int32)
        slots = np.array([request.slot for request in requests], np.int32)
        computed = self._table.num_computed[slots]
        uncomputed = self._table.num_tokens[slots] - computed
        wrong = (counts < 1) | (counts > uncomputed)
        if wrong.any():
            index = int(wrong.argmax())
            raise ValueError(
                f"request {requests[index].id} cannot be extended by {counts[index]} "
                f"tokens: it has {uncomputed[index]} that are not computed"
            )
        if np.unique(slots).size < slots.size:
            raise ValueError("a request is in the batch twice")
        shape = self._planner.shape(slots, counts)
        if shape is None or not self._chains.draw(requests, computed + counts):
            return None
        return self._step(requests, counts, shape)

    def commit(self, step: Step, result: KVPool | StagedRows) -> None:
        """Takes a step's result: its requests' new tokens count as computed.

        Requests that were closed or preempted while the step ran are passed over: what
        it wrote for them lies in pages that whoever draws them next writes first.

        Args:
          step: the step, planned against the cache's present state.
          result: the new pool, or the staged rows of `stage_scan`, which are then
            written into the (donated) pool here.

        Raises:
          StalePlanError: the pool was replaced since the step was planned.
          ValueError: the pool is not of this cache's spec and group.
        """
        self._check_fresh(step)
        if isinstance(result, StagedRows):
            pool = self._write_rows(self.pool, *result, step.plan)
        else:
            pool = result
        self._check_pool(pool)
        self._replace_pool(pool)
        kept = [
            index
            for index, (request, epoch) in enumerate(
                zip(step.requests, step.epochs, strict=True)
            )
            if request.epoch == epoch
        ]
        requests = [step.requests[index] for index in kept]
        self._chains.advance(requests, step.counts[kept])

    def fork(self, request: Request, num_forks: int) -> list[Request] | None:
        """Starts continuations of a request that share its full pages.

        The partial last page is copied, so that each continuation writes its own.

        Args:
          request: an open request; it goes on unchanged.
          num_forks: continuations to start.

        Returns:
          New requests with the same tokens, all computed as far; None where pages are
          short, and then nothing has changed.

        Raises:
          ValueError: `num_forks` is less than 1.
          ClosedRequestError: the request is closed.
        """
        self._check_running(request)
        if num_forks < 1:
            raise ValueError(f"{num_forks=} must be at least 1")
        fork = self._chains.fork(request, num_forks)
        if fork is None:
            return None
        if fork.src_pages.size:
            self._copy(fork.src_pages, fork.dst_pages)
        return fork.requests

    def preempt(self, request: Request) -> None:
        """Drops a request's pages and keeps its tokens; `resume` brings it back.

        Its whole computed pages stay in the prefix cache until they are evicted.

        Raises:
          ClosedRequestError: the request is closed.
          ValueError: it is preempted already.
        """
        self._check_running(request)
        self._chains.preempt(request)

    def resume(self, request: Request) -> bool:
        """Brings a preempted request back, with what is cached of it.

        Returns:
          False where there is no room for it now; it stays preempted.

        Raises:
          ClosedRequestError: the request is closed.
          ValueError: it is not preempted.
        """
        self._check_open(request)
        if not request.is_preempted:
            raise ValueError(f"request {request.id} is not preempted")
        return self._chains.resume(request)

    def close(self, request: Request) -> None:
        """Ends a request and gives its pages back.

        Whole pages of which every slot was computed stay in the prefix cache.

        Raises:
          ClosedRequestError: it is closed already.
        """
        self._check_open(request)
        self._chains.close(request)

    def abort(self, request: Request) -> None:
        """Ends a request at any point; what it computed is kept as `close` keeps it."""
        self.close(request)

    def clear(self) -> None:
        """Empties the prefix cache.

        Raises:
          PageAccountingError: open requests lease pages of it; nothing has changed.
        """
        self._chains.clear()

    def stats(self) -> CacheStats:
        """Pages by state and owner, and counts since the cache was made."""
        stats = self._chains.stats()
        return stats._replace(compilations=self._compilations.value)

    def warmup_steps(self) -> Iterator[Step]:
        """One empty step of every declared shape: run each to compile them all.

        Its plan is all padding: nothing real is read and no row is written. Commit
        every one (`cache.commit(step, pool)`) before asking for the next.
        """
        mode = self._planner.mode
        for shape in self.buckets.shapes(
            num_token_blocks=self._planner.num_token_blocks,
            striped=mode != "assembled",
            assembled=mode != "striped",
        ):
            yield self._step((), np.zeros(0, np.int32), shape)

    def _step(
        self, requests: tuple[Request, ...], counts: np.ndarray, shape: StepShape
    ) -> Step:
        plan = self._planner.build(requests, counts, shape)
        scratch = None
        if shape.num_rounds == 1:
            scratch = self._planner.scratch_map(requests, counts, shape)
        packed = pack_plan(plan, self.group)
        epochs = tuple(request.epoch for request in requests)
        return Step(
            packed, plan, requests, counts, epochs, shape, self._version, scratch
        )

    def _copy(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies logical pages; each pair lies on one shard."""
        owners = src % self.num_shards
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=self.num_shards)
        size = round_up(int(counts.max()), tuple(2**power for power in range(31)))
        within = np.arange(src.size) - np.repeat(np.cumsum(counts) - counts, counts)
        padded = np.zeros((2, self.num_shards, size or 1), np.int32)
        padded[1] = self.spec.pages_per_shard
        padded[0, owners[order], within] = src[order] // self.num_shards
        padded[1, owners[order], within] = dst[order] // self.num_shards
        sharding = self.group.sharding(self.group.axis)
        src_pages, dst_pages = jax.device_put((padded[0], padded[1]), sharding)
        self._replace_pool(self._copy_pages(self.pool, src_pages, dst_pages))

    def _replace_pool(self, pool: KVPool) -> None:
        self._pool = pool
        self._version += 1

    def _check_pool(self, pool: KVPool) -> None:
        if not isinstance(pool, KVPool):
            raise TypeError(f"expected a KVPool or StagedRows, got {type(pool)}")
        if pool.spec != self.spec or pool.group != self.group:
            raise ValueError(
                f"the pool is of {pool.spec} on {pool.group}, the cache of {self.spec} "
                f"on {self.group}"
            )
        for name in ("k", "v"):
            have, want = getattr(pool, name), getattr(self._pool, name)
            if have.shape != want.shape or have.dtype != want.dtype:
                raise ValueError(
                    f"pool.{name} is {have.dtype}{have.shape}, "
                    f"not {want.dtype}{want.shape}"
                )

    def _check_fresh(self, step: Step) -> None:
        if step.version != self._version:
            raise StalePlanError(
                f"the step was planned at version {step.version} of the cache, which "
                f"is now at {self._version}: plan it again"
            )

    def _check_open(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise TypeError(f"{request=} is no Request: did open return None?")
        if request.is_closed:
            raise ClosedRequestError(f"request {request.id} is closed")
        if request._table is not self._table:
            raise ValueError(f"request {request.id} belongs to another cache")

    def _check_running(self, request: Request) -> None:
        self._check_open(request)
        if request.lease is None:
            raise ValueError(f"request {request.id} is preempted: resume it first")

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_seq_len:
            raise CapacityError(
                f"{num_tokens=} exceeds the {self.max_seq_len} tokens that one request "
                f"may have ({self.num_shards} shards x {self.spec.usable_pages} usable "
                f"pages x {self.spec.page_size} tokens, and max_seq_len)"
            )

    def _checked_tokens(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(tokens)
        if array.ndim != 1:
            raise ValueError(f"tokens have shape {array.shape}, expected one axis")
        if not array.size:
            return np.zeros(0, np.int32)
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"tokens must be integers, got {array.dtype}")
        limit = self.vocab_size or 2**31
        wrong = (array < 0) | (array >= limit)
        if wrong.any():
            index = int(wrong.argmax())
            raise ValueError(
                f"token {array[index]} at index {index} is outside 0..{limit - 1}"
            )
        return array.astype(np.int32)
