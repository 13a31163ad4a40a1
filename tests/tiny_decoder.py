"""A tiny random GQA decoder in plain jax, and its dense double in numpy float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import testing

VOCAB = 50
HIDDEN = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyDecoder:
    """Attention layers only: what a cache can get wrong, and nothing else."""

    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    softcap: float | None = None
    window: int | None = None
    seed: int = 0

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        q_size, v_size = (
            self.num_heads * self.head_dim,
            self.num_heads * self.v_head_dim,
        )
        shapes = {
            "q": (HIDDEN, q_size),
            "k": (HIDDEN, self.num_kv_heads * self.head_dim),
            "v": (HIDDEN, self.num_kv_heads * self.v_head_dim),
            "o": (v_size, HIDDEN),
        }
        stacked = {
            name: rng.normal(size=(self.num_layers, *shape)) / shape[0] ** 0.5
            for name, shape in shapes.items()
        }
        stacked["embed"] = rng.normal(size=(VOCAB, HIDDEN))
        return {name: array.astype(np.float32) for name, array in stacked.items()}

    @property
    def layer_weights(self) -> dict[str, np.ndarray]:
        return {name: self.weights[name] for name in "qkvo"}

    def spec(self, **options) -> jaxkv.CacheSpec:
        options = {
            "page_size": 4,
            "pages_per_shard": 40,
            "dtype": "float32",
            "num_layers": self.num_layers,
            **options,
        }
        kv = jaxkv.GQA(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )
        return jaxkv.CacheSpec(kv=kv, **options)

    def qkv(self, x, w):
        """Heads of [T, hidden]; positions enter as a rotation of the first two dims."""
        return (
            (x @ w["q"]).reshape(x.shape[0], -1, self.head_dim),
            (x @ w["k"]).reshape(x.shape[0], -1, self.head_dim),
            (x @ w["v"]).reshape(x.shape[0], -1, self.v_head_dim),
        )

    def block(self, x, w, kv):
        q, k, v = self.qkv(x, w)
        angle = (kv.positions * 0.1)[:, None]
        q, k = (_rotate(part, angle, jnp) for part in (q, k))
        out, kv = kv.attend(q, k, v, softcap=self.softcap, window=self.window)
        return x + out.reshape(x.shape[0], -1) @ w["o"], kv

    def forward(self, params, pool, plan, *, loop=False):
        """Hidden rows of each sequence's last new token, and the new pool."""
        x = jaxkv.embed_tokens(params["embed"], pool, plan)
        layers = {name: params[name] for name in "qkvo"}
        if loop:
            blocks = [
                functools.partial(
                    lambda x, kv, w: self.block(x, w, kv),
                    w={name: layers[name][layer] for name in layers},
                )
                for layer in range(self.num_layers)
            ]
            x, pool = jaxkv.loop_layers(blocks, x, pool, plan)
        else:
            x, pool = jaxkv.scan_layers(self.block, x, layers, pool, plan)
        return jaxkv.last_rows(x, pool, plan), pool

    def dense(self, tokens) -> np.ndarray:
        """Hidden rows of a whole sequence, float64[T, hidden]."""
        x = self.weights["embed"].astype(np.float64)[np.asarray(tokens)]
        for layer in range(self.num_layers):
            w = {name: self.weights[name][layer].astype(np.float64) for name in "qkvo"}
            q, k, v = self.qkv(x, w)
            angle = (np.arange(len(x)) * 0.1)[:, None]
            q, k = (_rotate(part, angle, np) for part in (q, k))
            out = testing.dense_attention(
                q, k, v, softcap=self.softcap, window=self.window
            )
            x = x + out.reshape(len(x), -1) @ w["o"]
        return x


def _rotate(x, angle, numpy):
    cos, sin = numpy.cos(angle), numpy.sin(angle)
    first, second = x[..., 0], x[..., 1]
    turned = numpy.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return numpy.concatenate([turned, x[..., 2:]], axis=-1)


class Runner:
    """Drives one decoder and cache, and checks every row against the dense double."""

    def __init__(self, decoder: TinyDecoder, cache: jaxkv.KVCache, step=None):
        self.decoder = decoder
        self.cache = cache
        self.params = {k: jnp.asarray(v) for k, v in decoder.weights.items()}
        self.worst = 0.0
        self._step = jax.jit(
            step or decoder.forward,
            donate_argnames="pool",
            # tiny arrays: compiling them well costs more than running them
            compiler_options={"xla_backend_optimization_level": 0},
        )

    def run(self, batch) -> np.ndarray:
        """One step over (request, new tokens); returns its rows."""
        step = self.cache.plan(batch)
        assert step is not None
        out, pool = self._step(self.params, pool=self.cache.pool, plan=step.plan)
        self.cache.commit(step, pool)
        rows = np.asarray(out)
        for (request, _), row in zip(batch, rows, strict=False):
            want = self.decoder.dense(request.tokens[: request.num_computed])[-1]
            self.worst = max(self.worst, float(np.abs(row - want).max()))
        return rows
