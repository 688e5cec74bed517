"""A model's own tokenizer and chat template, rebuilt from the metadata of its GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from kvstore_engine.gguf_loader import ModelFileError, read_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gguf import GGUFReader

# Values of tokenizer.ggml.token_type that are matched in text before it is split into words.
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4


class Tokenizer:
    """Byte-level BPE with the model's special tokens. Encoding adds no tokens of its own."""

    def __init__(self, bpe: BpeTokenizer, eos_ids: frozenset[int], chat_template: str) -> None:
        self._bpe = bpe
        self.eos_ids = eos_ids
        self._chat_template = chat_template

    @classmethod
    def from_gguf(cls, reader: GGUFReader) -> Tokenizer:
        """Raises: ModelFileError: the file's tokenizer is missing or of another kind."""
        kind = read_metadata(reader, "tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelFileError(f"tokenizer kind {kind!r} is not supported, only byte-level BPE ('gpt2')")
        tokens: list[str] = read_metadata(reader, "tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in read_metadata(reader, "tokenizer.ggml.merges")]
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        bpe = BpeTokenizer(models.BPE(vocab=vocabulary, merges=merges))
        bpe.pre_tokenizer = _pre_tokenizer(read_metadata(reader, "tokenizer.ggml.pre", "gpt-2"))
        bpe.decoder = decoders.ByteLevel()
        token_types = read_metadata(reader, "tokenizer.ggml.token_type", [])
        for token, token_type in zip(tokens, token_types, strict=False):
            if token_type == _CONTROL_TOKEN:
                bpe.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            elif token_type == _USER_DEFINED_TOKEN:
                bpe.add_tokens([AddedToken(token, normalized=False)])
        eos_id = int(read_metadata(reader, "tokenizer.ggml.eos_token_id"))
        return cls(bpe, frozenset({eos_id}), read_metadata(reader, "tokenizer.chat_template", ""))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens written out in it ("<|im_end|>") become those tokens."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`. Bytes that are not UTF-8, such as half a character, come out as U+FFFD."""
        return self._bpe.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, by the model's own template (which may add a system prompt).

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: end with the opening of the assistant's turn, for it to continue.
        Raises: ValueError: the model has no chat template, or its template refuses these messages.
        """
        if not self._chat_template:
            raise ValueError("the model file has no chat template")
        # A template is code from a downloaded file, so it runs in jinja2's sandbox.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse_messages
        template = environment.from_string(self._chat_template)
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `render_chat`."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before BPE, by llama.cpp's name for it."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return words
    if name == "smollm":
        # Every digit stands alone, and spaces before a number are a word of their own.
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    raise ModelFileError(f"pre-tokenizer {name!r} is not supported, only 'gpt-2' and 'smollm'")


def _refuse_messages(reason: str) -> NoReturn:
    raise ValueError(f"the chat template refuses these messages: {reason}")
