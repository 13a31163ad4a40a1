"""A Llama-architecture decoder in Flax NNX (SmolLM2, Llama 3, Mistral and the like).

Everything outside attention is token-wise, so the decoder takes the step's tokens in
the order that the plan packs them and needs nothing else from it:

    tokens [T] -> embed -> blocks over scan_layers -> last rows [S] -> norm -> logits
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama-architecture model, named as in Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Takes the fields out of config.json.

        Raises:
          ValueError: the model needs something that this decoder does not have.
        """
        if config.get("model_type") != "llama":
            raise ValueError(
                f"model_type={config.get('model_type')!r} is not one of ['llama']"
            )
        for name in ("rope_scaling", "attention_bias", "mlp_bias"):
            if config.get(name):
                raise ValueError(f"{name}={config[name]!r} is not supported")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: config[name] for name in names})

    def cache_spec(
        self, page_size: int, pages_per_shard: int, dtype: Any
    ) -> jaxkv.CacheSpec:
        """The spec of a cache for this model."""
        return jaxkv.CacheSpec(
            num_layers=self.num_hidden_layers,
            kv=jaxkv.GQA(num_kv_heads=self.num_key_value_heads, head_dim=self.head_dim),
            page_size=page_size,
            pages_per_shard=pages_per_shard,
            dtype=dtype,
        )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight[None]


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Half-split rotary embedding of [T, heads, D] at positions i32[T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float32) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x.dtype)


class LlamaBlock(nnx.Module):
    """One layer; as a stack, every weight has the layers as leading axis.

    Weights are `[in, out]`, in the order that tensor parallelism splits: `out` of q, k,
    v, gate and up, `in` of o and down.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, jax.Array]):
        self.config = config
        self.input_norm = nnx.Param(weights["input_layernorm"])
        self.q = nnx.Param(weights["self_attn.q_proj"])
        self.k = nnx.Param(weights["self_attn.k_proj"])
        self.v = nnx.Param(weights["self_attn.v_proj"])
        self.o = nnx.Param(weights["self_attn.o_proj"])
        self.mlp_norm = nnx.Param(weights["post_attention_layernorm"])
        self.gate = nnx.Param(weights["mlp.gate_proj"])
        self.up = nnx.Param(weights["mlp.up_proj"])
        self.down = nnx.Param(weights["mlp.down_proj"])

    def __call__(
        self, x: jax.Array, kv: jaxkv.LayerKV
    ) -> tuple[jax.Array, jaxkv.LayerKV]:
        """[T, hidden] to the same, through the layer's view of the cache."""
        config = self.config
        normed = rms_norm(x, self.input_norm[...], config.rms_norm_eps)
        q, k, v = (
            (normed @ weight[...]).reshape(x.shape[0], -1, config.head_dim)
            for weight in (self.q, self.k, self.v)
        )
        q = rotate(q, kv.positions, config.rope_theta)
        k = rotate(k, kv.positions, config.rope_theta)
        out, kv = kv.attend(q, k, v)
        x = x + out.reshape(x.shape[0], -1) @ self.o[...]
        normed = rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
        gated = jax.nn.silu(normed @ self.gate[...]) * (normed @ self.up[...])
        return x + gated @ self.down[...], kv


class Llama(nnx.Module):
    """The decoder: embedding, a stack of blocks, norm and head."""

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, np.ndarray],
        mesh: Mesh,
        head_axis: str | None = None,
        dtype: Any = jnp.float32,
    ):
        """Places a checkpoint's tensors on a mesh.

        Args:
          config: the model's sizes.
          tensors: weights by Hugging Face name, `[out, in]`.
          mesh: the mesh of the cache.
          head_axis: the axis that splits KV heads; weights split with them (tensor
            parallelism). Over all other axes they are replicated.
          dtype: element type of weights and activations.
        """

        def place(array: np.ndarray, *spec: str | None) -> jax.Array:
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.device_put(np.asarray(array, dtype), sharding)

        def stack(name: str, *spec: str | None) -> jax.Array:
            layers = range(config.num_hidden_layers)
            parts = [tensors[f"model.layers.{layer}.{name}.weight"] for layer in layers]
            # Hugging Face stores [out, in]
            return place(np.stack([part.T for part in parts]), None, *spec)

        split_out, split_in = (None, head_axis), (head_axis, None)
        weights = {
            "input_layernorm": stack("input_layernorm"),
            "post_attention_layernorm": stack("post_attention_layernorm"),
            "self_attn.o_proj": stack("self_attn.o_proj", *split_in),
            "mlp.down_proj": stack("mlp.down_proj", *split_in),
        }
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            weights[name] = stack(name, *split_out)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            weights[name] = stack(name, *split_out)
        self.config = config
        self.mesh = mesh
        self.embedding = nnx.Param(place(tensors["model.embed_tokens.weight"]))
        self.blocks = LlamaBlock(config, weights)
        self.norm = nnx.Param(place(tensors["model.norm.weight"]))
        self.head = None
        if not config.tie_word_embeddings:
            self.head = nnx.Param(place(tensors["lm_head.weight"]))

    def __call__(
        self, pool: jaxkv.KVPool, plan: jaxkv.StepPlan, *, attention: str = "auto"
    ) -> tuple[jax.Array, jaxkv.KVPool]:
        """Runs one step; donate the pool to the jitted caller.

        Returns:
          Logits f32[S, vocab] of each sequence's last new token, and the new pool.
        """
        graph, params = nnx.split(self.blocks)

        def block(x, params, kv):
            return nnx.merge(graph, params)(x, kv)

        x = jaxkv.embed_tokens(self.embedding[...], pool, plan)
        x, pool = jaxkv.scan_layers(block, x, params, pool, plan, attention=attention)
        x = jaxkv.last_rows(x, pool, plan)
        x = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        head = self.embedding if self.head is None else self.head
        logits = jnp.einsum(
            "se,ve->sv", x, head[...], preferred_element_type=jnp.float32
        )
        return logits, pool
