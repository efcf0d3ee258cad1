"""Text to ids and back. With the released files, where they are beside the project; the small ones are always here."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from antiphon.errors import CheckpointError
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, TextStream, TextTokenizer, load_tokenizer
from build import GOLDEN_CHECKPOINT

OFFICIAL = Path(__file__).parents[3] / "shared" / "official_tokenizer"
needs_official = pytest.mark.skipif(not OFFICIAL.is_dir(), reason="the released tokenizer is not ours to ship")
WORDS = "Grüße, 世界! naïve – “½ €” 🙂👩‍👩‍👧‍👦🇨🇭 안녕하세요 مرحبا\r\n\t "


class Case(BaseModel):
    text: str
    ids: tuple[int, ...]
    decoded: str
    decoded_without_special: str


class Cases(BaseModel):
    eos: int
    cases: list[Case]


@pytest.fixture(scope="module")
def small() -> TextTokenizer:
    """One id per byte."""
    return load_tokenizer(GOLDEN_CHECKPOINT)


@pytest.fixture(scope="module")
def official() -> TextTokenizer:
    return load_tokenizer(OFFICIAL)


@needs_official
def test_texts_have_the_ids_of_the_released_tokenizer(official: TextTokenizer) -> None:
    cases = Cases.model_validate_json((OFFICIAL / "cases.json").read_text(encoding="utf-8"))
    assert len(cases.cases) > 20
    for case in cases.cases:
        assert official.encode(case.text) == case.ids, case.text
        assert official.decode(case.ids) == case.decoded_without_special, case.text
    assert official.special.eos == cases.eos


@needs_official
def test_roles_have_the_ids_of_the_reference(official: TextTokenizer) -> None:
    """REFERENCE 3."""
    special, duplex = official.special, official.special.duplex
    assert (special.image_start, special.image_end) == (151669, 151670)
    assert (special.slice_start, special.slice_end) == (151679, 151680)
    assert (duplex.unit_start, duplex.unit_end) == (151683, 151684)
    assert (duplex.tts_bos, duplex.listen) == (151703, 151705)
    assert (duplex.turn_eos, duplex.chunk_eos) == (151717, 151718)
    assert official.encode("<|chunk_tts_eos|>") == (duplex.chunk_tts_eos,)


@needs_official
def test_forbidden_are_the_bad_ids_the_pad_of_speech_and_the_end_of_a_chunk(official: TextTokenizer) -> None:
    bad = json.loads((OFFICIAL / "tokenizer_config.json").read_text(encoding="utf-8"))["bad_token_ids"]
    (pad,) = official.encode("<|tts_pad|>")
    assert set(official.special.forbidden) == {*bad, pad, official.special.duplex.chunk_eos}
    assert len(official.special.forbidden) == 6967
    spoken = {official.special.duplex.listen, official.special.duplex.turn_eos, official.special.duplex.tts_bos}
    assert not spoken & set(official.special.forbidden)


def test_text_without_special_tokens_survives_the_way_to_ids_and_back(small: TextTokenizer) -> None:
    assert small.decode(small.encode(WORDS)) == WORDS
    assert small.encode("") == ()
    assert small.decode(()) == ""


def test_the_text_of_a_special_token_becomes_that_token_and_is_skipped_on_the_way_back(small: TextTokenizer) -> None:
    ids = small.encode("a<|listen|>b<|turn_eos|>")
    duplex = small.special.duplex
    assert ids == (*small.encode("a"), duplex.listen, *small.encode("b"), duplex.turn_eos)
    assert small.decode(ids) == "ab"
    assert small.text_ids(ids) == small.encode("ab")


def test_forbidden_ids_come_from_the_checkpoint(small: TextTokenizer) -> None:
    (pad,) = small.encode("<|tts_pad|>")
    assert small.special.forbidden == tuple(sorted({3, 5, pad, small.special.duplex.chunk_eos}))
    assert small.encode("<|im_end|>") == (small.special.eos,)


def test_the_marker_of_earlier_words_is_plain_text(small: TextTokenizer) -> None:
    ids = small.encode(PREVIOUS_MARKER)
    assert small.text_ids(ids) == ids


def write_merges(folder: Path, first_special: int) -> None:
    """The small tokenizer in the layout without tokenizer.json: bytes, two merges, then the special tokens."""
    whole = json.loads((GOLDEN_CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
    special = [token["content"] for token in whole["added_tokens"] if token["special"]]
    vocab = {
        **{token: number for token, number in whole["model"]["vocab"].items() if number < 256},
        "he": 256,
        "ll": 257,
    }
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\n", encoding="utf-8")
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "added_tokens_decoder": {first_special + i: {"content": text} for i, text in enumerate(special)},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_vocab_and_merges_with_added_tokens_are_a_tokenizer_too(tmp_path: Path) -> None:
    write_merges(tmp_path, first_special=258)
    tokenizer = load_tokenizer(tmp_path)
    o = tokenizer.encode("o")
    assert tokenizer.encode("hello<unit>") == (256, 257, *o, tokenizer.special.duplex.unit_start)
    assert tokenizer.decode(tokenizer.encode(WORDS)) == WORDS
    assert 258 <= tokenizer.special.eos < 258 + len(tokenizer.special_ids)


def test_an_added_token_that_would_get_another_id_than_the_files_say_is_refused(tmp_path: Path) -> None:
    write_merges(tmp_path, first_special=259)
    with pytest.raises(CheckpointError, match=r"should have id 259, the files give 258"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_the_tokens_of_a_call_is_refused_by_their_names(tmp_path: Path) -> None:
    text = (GOLDEN_CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(text.replace("<|listen|>", "<|hark|>"), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"lacks <\|listen\|>;"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": "{"},
        {"tokenizer_config.json": "{}"},
        {"tokenizer_config.json": '{"eos_token": "x"}'},
        {"tokenizer_config.json": '{"eos_token": "x"}', "tokenizer.json": "{}"},
        {"tokenizer_config.json": '{"eos_token": "x"}', "vocab.json": "{}"},
    ],
)
def test_missing_and_damaged_files_are_refused(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def cut(ids: tuple[int, ...], places: list[int]) -> list[tuple[int, ...]]:
    ends = [*sorted(place % (len(ids) + 1) for place in places), len(ids)]
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def check_stream(tokenizer: TextTokenizer, text: str, places: list[int]) -> None:
    """Pieces of the ids come out as whole characters, as soon as they are whole, and as the same text together."""
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    stream, shown, num_pushed = TextStream(tokenizer), "", 0
    for piece in cut(ids, places):
        shown += stream.push(piece)
        num_pushed += len(piece)
        assert whole.startswith(shown), f"{shown!r} is not how {whole!r} begins"
        assert shown.startswith(complete(tokenizer, ids[:num_pushed])), f"{shown!r} holds back what is complete"
    assert shown + stream.finish() == whole
    assert stream.finish() == ""


def complete(tokenizer: TextTokenizer, ids: tuple[int, ...]) -> str:
    """The text of the longest beginning of `ids` that ends with a character."""
    ends = (tokenizer.decode(ids[:end]) for end in range(len(ids), -1, -1))
    return next(text for text in ends if not text.endswith("\ufffd"))


# The replacement character itself would look like an unfinished one; it has a test of its own.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=12) | st.text(
    st.sampled_from(WORDS), max_size=12
)
places = st.lists(st.integers(0, 100), max_size=6)


@given(text=texts, places=places)
@example(text="hello 🙂!", places=[7])
def test_any_pieces_give_the_text_in_whole_characters(small: TextTokenizer, text: str, places: list[int]) -> None:
    check_stream(small, text, places)


@needs_official
@given(text=texts, places=places)
@example(text="hello 👩‍👩‍👧‍👦!", places=[3])
def test_any_pieces_give_the_text_with_the_released_tokenizer(
    official: TextTokenizer, text: str, places: list[int]
) -> None:
    check_stream(official, text, places)


@given(text=texts)
def test_one_id_at_a_time_gives_the_text_in_whole_characters(small: TextTokenizer, text: str) -> None:
    check_stream(small, text, list(range(101)))


def test_special_tokens_between_the_bytes_of_a_character_do_not_break_it(small: TextTokenizer) -> None:
    first, *rest = small.encode("é")
    stream = TextStream(small)
    assert stream.push((first, *[small.special.duplex.turn_eos] * 4)) == ""
    assert stream.push((small.special.duplex.listen, *rest)) == "é"


def test_an_unfinished_character_at_the_end_of_a_turn_is_shown_as_replaced(small: TextTokenizer) -> None:
    stream = TextStream(small)
    assert stream.push(small.encode("a🙂")[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.push(small.encode("b")) == "b"


@given(pieces=st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=20))
def test_what_waits_is_at_most_one_character_whatever_came(small: TextTokenizer, pieces: list[list[int]]) -> None:
    stream = TextStream(small)
    for piece in pieces:
        stream.push(tuple(piece))
        assert len(copy(stream).finish()) <= 3
