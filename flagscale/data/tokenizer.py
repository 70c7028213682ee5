"""Text to token ids and back: the demo's character tokenizer, and any Hugging Face tokenizer folder.

Text is always plain here: `encode` never yields a special token, whatever the text says, so that a data set cannot
open turns or insert placeholders by spelling them out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flagscale.config.errors import UserError
from flagscale.data.records import SampleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flagscale.config.schema import ModelConfig, TokenizerConfig

SPECIAL_TEXTS = {
    "pad": "<|endoftext|>",
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that structure a sample; the texts are in `SPECIAL_TEXTS`."""

    pad: int
    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    image: int
    video: int


class Tokenizer(Protocol):
    """What the data path asks of a tokenizer."""

    special: SpecialTokens
    vocab_size: int
    fingerprint: str
    has_template: bool  # then it is a `TemplateTokenizer` (template.py) as well

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without special tokens. Raises SampleError for text it cannot represent."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""


# The demo's vocabulary, stated in configs/model/qwen35_tiny.yaml: seven special tokens, newline, printable ASCII.
BUILTIN_SPECIAL = SpecialTokens(pad=0, im_start=1, im_end=2, vision_start=3, vision_end=4, image=5, video=6)
BUILTIN_CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
BUILTIN_FIRST_CHARACTER_ID = 7
BUILTIN_VOCAB_SIZE = BUILTIN_FIRST_CHARACTER_ID + len(BUILTIN_CHARACTERS)


class BuiltinTokenizer:
    """One token a character of printable ASCII and newline; ids 0..6 are special, `BUILTIN_VOCAB_SIZE` ids in all."""

    special = BUILTIN_SPECIAL
    vocab_size = BUILTIN_VOCAB_SIZE
    fingerprint = "builtin-1"
    has_template = False

    def __init__(self) -> None:
        self._ids = {character: BUILTIN_FIRST_CHARACTER_ID + i for i, character in enumerate(BUILTIN_CHARACTERS)}

    def encode(self, text: str) -> list[int]:
        """Ids of the characters. Raises SampleError for one outside printable ASCII."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise SampleError(
                f"has the character {error.args[0]!r}, which the builtin tokenizer lacks (it knows newline and "
                "printable ASCII); remove it, or set data.tokenizer.type=hf and data.tokenizer.path"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        first = BUILTIN_FIRST_CHARACTER_ID
        return "".join(BUILTIN_CHARACTERS[i - first] for i in ids if first <= i < BUILTIN_VOCAB_SIZE)


class HFTokenizer:
    """A tokenizer folder as saved by transformers, read without network.

    Raises:
        UserError: when the folder is missing, holds no tokenizer, or lacks a special token of `SPECIAL_TEXTS`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if not self._path.is_dir():
            raise UserError(f"data.tokenizer.path={str(path)!r}: no such folder; give the folder of a saved tokenizer")
        self._tokenizer = self._load()
        self.special = SpecialTokens(**{name: self._special_id(text) for name, text in SPECIAL_TEXTS.items()})
        self.vocab_size = len(self._tokenizer)
        self.has_template = self._tokenizer.chat_template is not None
        self.fingerprint = self._hash_files()

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        try:
            # Code in the folder is refused; without the answer here transformers asks on the terminal, and waits.
            return AutoTokenizer.from_pretrained(str(self._path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # damaged files fail in any way
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"data.tokenizer.path={str(self._path)!r}: not a readable tokenizer ({reason}); "
                "the folder needs tokenizer.json or vocab.json with merges.txt, and tokenizer_config.json"
            ) from None

    def _special_id(self, text: str) -> int:
        token_id = self._tokenizer.get_vocab().get(text)
        if token_id is None:
            raise UserError(
                f"data.tokenizer.path={str(self._path)!r}: the vocabulary has no token {text!r}; "
                "use a Qwen3.5 tokenizer or add the token"
            )
        return int(token_id)

    def _hash_files(self) -> str:
        """Hash of the files that decide on ids, so that an index built with others is not reused."""
        digest = hashlib.sha256()
        names = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json")
        names += ("chat_template.jinja", "chat_template.json")
        for name in names:
            file = self._path / name
            if file.is_file():
                digest.update(name.encode() + b"\0" + file.read_bytes())
        return "hf-" + digest.hexdigest()[:16]

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The conversation by the tokenizer's chat template."""
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, TypeError) as error:
            raise SampleError(f"is refused by the tokenizer's chat template ({error}); correct the turns") from None

    def encode_template(self, text: str) -> list[int]:
        """Ids of a template's text, in which special tokens are meant."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens spelled out in it stay text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(config: TokenizerConfig, model: ModelConfig) -> Tokenizer:
    """The tokenizer of `data.tokenizer`, checked against the model.

    Raises:
        UserError: when it cannot be read, or does not fit the model (see `check_against_model`).
    """
    if config.type == "builtin":
        tokenizer: Tokenizer = BuiltinTokenizer()
    elif config.path is None:
        raise UserError("data.tokenizer.path=None: data.tokenizer.type=hf needs the folder of a saved tokenizer")
    else:
        tokenizer = HFTokenizer(config.path)
    check_against_model(tokenizer, model)
    return tokenizer


def check_against_model(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Refuse a tokenizer whose ids the model would take for something else.

    Raises:
        UserError: when a vision token's id differs from the model's key, or an id lies outside `model.vocab_size`.
    """
    special = tokenizer.special
    pairs = {
        "image_token_id": special.image,
        "video_token_id": special.video,
        "vision_start_token_id": special.vision_start,
        "vision_end_token_id": special.vision_end,
    }
    for name, tokenizer_id in pairs.items():
        model_id = getattr(model, name)
        if model_id != tokenizer_id:
            text = SPECIAL_TEXTS[name.removesuffix("_token_id")]
            raise UserError(
                f"model.{name}={model_id}: the tokenizer's id of {text} is {tokenizer_id}; both must be equal, "
                f"set model.{name}={tokenizer_id} or take the model's own tokenizer (data.tokenizer)"
            )
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size}: the tokenizer has {tokenizer.vocab_size} ids, which need as many "
            f"rows; set model.vocab_size to at least {tokenizer.vocab_size}"
        )
