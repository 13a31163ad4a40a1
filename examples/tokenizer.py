"""Text to token ids and back: one wrapper for GGUF and Hugging Face tokenizers.

Special tokens in a text become single ids, as a rendered chat prompt needs, and
`decode` writes them out again, so that `decode(encode(text)) == text`.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

# `tokenizer.ggml.token_type` of a token that is matched whole.
_CONTROL, _USER_DEFINED = 3, 4

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` with its chat template.

    Attributes:
        backend: the tokenizer itself.
        chat_template: Jinja source, None for a model that does not chat.
        special_tokens: role ("bos_token", "eos_token", ...) to token text, as chat
            templates know them.
    """

    backend: tokenizers.Tokenizer
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the BOS that the tokenizer itself adds, if any.

        A text that already starts with BOS, as most rendered chats do, gets no second
        one. Bytes that the vocabulary lacks are dropped, as Hugging Face drops them
        (SmolLM2 lacks six control characters and the lead bytes F1 and F2).
        """
        bos = self.special_tokens.get("bos_token")
        add_special_tokens = bos is None or not text.startswith(bos)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of `chat(messages)`: the template alone decides about BOS."""
        return self.backend.encode(self.chat(messages), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included; incomplete UTF-8 becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def stream(self) -> "TokenStream":
        """A fresh incremental decoder for one sequence."""
        return TokenStream(self)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, ending where the assistant is to answer.

        Args:
            messages: each with "role" and "content", oldest first.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        try:
            template = _template_environment().from_string(self.chat_template)
            # Templates test `tools is not none`, which an undefined name would pass.
            return template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template cannot render {messages=}: {error}"
            ) from error


class TokenStream:
    """Decodes a sequence token by token, holding back incomplete characters.

    The texts of all `push` calls and of `flush`, joined, are `decode` of all ids:

        ids       [ context | fresh ]      context: ended a character, was emitted
        decode    [ ....... | abc\ufffd ]       emitted up to the replacement characters

    The context stays because some decoders treat the first token of a text apart.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context_len = 0
        self._num_emitted = 0  # characters of decode(self._ids)

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes, possibly none."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        # Only what follows the last whole character can still change.
        complete = text.rstrip(_REPLACEMENT)
        emitted = complete[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(complete))
        if emitted and len(complete) == len(text):
            self._ids = self._ids[self._context_len :]
            self._context_len = len(self._ids)
            self._num_emitted = len(self._tokenizer.decode(self._ids))
        return emitted

    def flush(self) -> str:
        """Text still held back; the stream then starts anew."""
        text = self._tokenizer.decode(self._ids)[self._num_emitted :]
        self._ids, self._context_len, self._num_emitted = [], 0, 0
        return text


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata holds.

    Args:
        metadata: GGUF keys to plain values.

    Raises:
        ValueError: a kind of tokenizer other than those in `_PRE_TOKENIZERS`.
    """
    model = metadata.get("tokenizer.ggml.model", "")
    pre = metadata.get("tokenizer.ggml.pre", "")
    if (model, pre) not in _PRE_TOKENIZERS:
        raise ValueError(f"{(model, pre)=} is not one of {sorted(_PRE_TOKENIZERS)}")
    pieces: list[str] = metadata["tokenizer.ggml.tokens"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(pieces)},
            merges=[
                (left, right)
                for left, _, right in (
                    merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"]
                )
            ],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[model, pre])
    backend.decoder = decoders.ByteLevel()
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    backend.add_tokens(
        [
            tokenizers.AddedToken(piece, special=type_ == _CONTROL, normalized=False)
            for piece, type_ in zip(pieces, types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    return Tokenizer(
        backend,
        metadata.get("tokenizer.chat_template"),
        {
            f"{role}_token": pieces[metadata[key]]
            for role in ("bos", "eos")
            if (key := f"tokenizer.ggml.{role}_token_id") in metadata
        },
    )


# By the file's (model, pre); llama.cpp's regex for "smollm" is these two steps.
_PRE_TOKENIZERS = {
    ("gpt2", "smollm"): [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Reads tokenizer.json and, where present, tokenizer_config.json and
    chat_template.jinja (which wins over a template in the former).

    Raises:
        FileNotFoundError: the folder has no tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(path))
    # Files saved after training may cut or pad what they encode.
    backend.no_truncation()
    backend.no_padding()
    config_path = folder / "tokenizer_config.json"
    config = {}
    if config_path.is_file():
        config = json.loads(config_path.read_text(encoding="utf-8"))
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    template_path = folder / "chat_template.jinja"
    if template_path.is_file():
        template = template_path.read_text(encoding="utf-8")
    special_tokens = {}
    for role, token in config.items():
        if role.endswith("_token"):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                special_tokens[role] = text
    return Tokenizer(backend, template, special_tokens)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face sets it up, since templates are written against that."""

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        # Jinja's own filter escapes for HTML.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: (
        datetime.datetime.now().strftime(layout)
    )
    return environment
