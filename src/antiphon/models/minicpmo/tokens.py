"""Text to ids and back with the checkpoint's own tokenizer files, and the ids that steer a call.

Reads `tokenizer.json`, or `vocab.json` + `merges.txt` with the added tokens of `tokenizer_config.json`. Ids are never
hard-coded: special tokens are looked up by their text (REFERENCE 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from antiphon.core.chat import ChatTokens
from antiphon.core.duplex import DuplexTokens
from antiphon.errors import CheckpointError

PREVIOUS_MARKER = "\n\nprevious: "

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen tokenizers cut text before merging; part of the released tokenizer.json, restated for the other layout."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids by role.

    duplex: what the loop acts on. chat: what an answer of a chat acts on.
    image_start .. slice_end: around a picture's and a slice's embeddings.
    eos: the tokenizer's end of text, the id that the reference's listen rules really act on (REFERENCE quirk 1).
    forbidden: never sampled: the pad token, `chunk_eos` (decided apart) and the checkpoint's bad ids.
    unspeakable: never sampled in a chat's spoken answer: what is forbidden, but for what steers the answer, and marks.
    """

    duplex: DuplexTokens
    chat: ChatTokens
    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    eos: int
    forbidden: tuple[int, ...]
    unspeakable: tuple[int, ...]


class _AddedToken(BaseModel):
    content: str
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False
    special: bool = True


class _TokenizerConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")
    eos_token: str | _AddedToken
    bad_token_ids: tuple[int, ...] = ()
    added_tokens_decoder: dict[int, _AddedToken] = {}


class TextTokenizer:
    """The checkpoint's tokenizer. Encoding adds no tokens of its own; decoding skips special ones."""

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self.special = special
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        # The switch belongs to a tokenizer, so that who must not be heard as a token has one of its own.
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text`; the text of a special token becomes that token."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of `text` as words only; the text of a special token is read letter by letter."""
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of `ids` without special tokens; bytes that are no character become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def is_text(self, ids: tuple[int, ...]) -> bool:
        """Whether all of `ids` are in the vocabulary and none is special."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return all(0 <= i < size and i not in self.special_ids for i in ids)

    def text_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """`ids` without the special ones."""
        return tuple(i for i in ids if i not in self.special_ids)


class TextStream:
    """Decodes one session's words as they come; characters whose bytes are split over pieces come out whole.

    Bounded: only the ids of the unfinished character are kept, in `pending_ids`.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.pending_ids: tuple[int, ...] = ()

    def push(self, ids: tuple[int, ...]) -> str:
        """Text that is complete with `ids`."""
        pending = self.pending_ids + self._tokenizer.text_ids(ids)
        for num_kept in range(min(_MAX_UNFINISHED_TOKENS, len(pending)) + 1):
            end = len(pending) - num_kept
            text = self._tokenizer.decode(pending[:end])
            if not text.endswith("\ufffd"):
                break
        # Without a whole place near the end the bytes before it are broken; they come out as what they are.
        self.pending_ids = pending[end:]
        return text

    def finish(self) -> str:
        """What is left at a turn's end, unfinished characters as U+FFFD."""
        text = self._tokenizer.decode(self.pending_ids)
        self.pending_ids = ()
        return text


_MAX_UNFINISHED_TOKENS = 3
"""A character has at most four bytes, a token at least one, and the last one is what is awaited."""


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Raises: CheckpointError if files are missing, unreadable or lack a token that a call needs."""
    config = _read_config(folder / "tokenizer_config.json")
    tokenizer = _read_tokenizer(folder, config)
    eos = config.eos_token if isinstance(config.eos_token, str) else config.eos_token.content
    return TextTokenizer(tokenizer, special_tokens(tokenizer, eos, config.bad_token_ids))


def special_tokens(tokenizer: Tokenizer, eos_token: str, bad_ids: tuple[int, ...]) -> SpecialTokens:
    """Look up every token that a call needs. Raises: CheckpointError naming those that are missing."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    missing = [text for text in (*_ROLES.values(), eos_token) if text not in vocab]
    if missing:
        raise CheckpointError(f"the tokenizer lacks {', '.join(missing)}; a duplex model needs them")
    ids = {role: vocab[text] for role, text in _ROLES.items()}
    forbidden = {ids["tts_pad"], ids["chunk_eos"], *bad_ids}
    unspoken = {vocab[character] for character in _UNSPOKEN if character in vocab}
    chat = ChatTokens(
        ends=(vocab[eos_token], ids["text_end"], ids["tts_eos"]),
        piece_end=ids["chunk_eos"],
        decisions=(ids["listen"], ids["speak"], ids["turn_eos"]),
    )
    return SpecialTokens(
        duplex=DuplexTokens(
            unit_start=ids["unit_start"],
            unit_end=ids["unit_end"],
            listen=ids["listen"],
            tts_bos=ids["tts_bos"],
            turn_eos=ids["turn_eos"],
            chunk_eos=ids["chunk_eos"],
            chunk_tts_eos=ids["chunk_tts_eos"],
        ),
        chat=chat,
        image_start=ids["image_start"],
        image_end=ids["image_end"],
        slice_start=ids["slice_start"],
        slice_end=ids["slice_end"],
        eos=vocab[eos_token],
        forbidden=tuple(sorted(forbidden)),
        unspeakable=tuple(sorted((forbidden | unspoken) - {*chat.ends, chat.piece_end})),
    )


_UNSPOKEN = ":#@*()[]&/$"
"""Tokens that a spoken answer does without (REFERENCE 14.4)."""
_ROLES = {
    "unit_start": "<unit>",
    "unit_end": "</unit>",
    "listen": "<|listen|>",
    "tts_bos": "<|tts_bos|>",
    "turn_eos": "<|turn_eos|>",
    "chunk_eos": "<|chunk_eos|>",
    "chunk_tts_eos": "<|chunk_tts_eos|>",
    "image_start": "<image>",
    "image_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "tts_pad": "<|tts_pad|>",
    "text_end": "<|endoftext|>",
    "tts_eos": "<|tts_eos|>",
    "speak": "<|speak|>",
}


def _read_config(path: Path) -> _TokenizerConfig:
    try:
        return _TokenizerConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise CheckpointError(f"{path} cannot be read as a tokenizer configuration: {error}") from error


def _read_tokenizer(folder: Path, config: _TokenizerConfig) -> Tokenizer:
    whole = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(whole)) if whole.exists() else _from_merges(folder)
    except Exception as error:
        raise CheckpointError(
            f"{folder} has no readable tokenizer.json, nor vocab.json and merges.txt: {error}"
        ) from error
    known = tokenizer.get_vocab(with_added_tokens=True)
    for number, token in sorted(config.added_tokens_decoder.items()):
        tokenizer.add_special_tokens([_added(token)]) if token.special else tokenizer.add_tokens([_added(token)])
        if tokenizer.token_to_id(token.content) != number:
            raise CheckpointError(
                f"{folder}: token {token.content} should have id {number}, the files give "
                f"{tokenizer.token_to_id(token.content)} ({len(known)} tokens without added ones)"
            )
    return tokenizer


def _from_merges(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _added(token: _AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        single_word=token.single_word,
        special=token.special,
    )
