"""Makes random weights listen, speak and stop, whatever they hear.

A few channels of the thinker's states, the signals, belong to this file: no layer reads or writes them. A token's
embedding says on them what kind of token it is, and the output head reads from them what kind comes next:

    sound, urge > 0: <|speak|>     <|speak|>: space        consonant: vowel                         . ! ?: <|turn_eos|>
    sound, urge < 0: <|listen|>    <|tts_bos|>: . ! ?      space: consonant                  <|turn_eos|>: <|chunk_eos|>
                                                           vowel: consonant, space or <|chunk_eos|>

The other channels are random, mix the whole context and choose within the wanted kind. A turn ends in the first unit
that would rather listen (REFERENCE 4.3). A chat sees the second choice: space, or after <|chunk_eos|> <|im_end|>.

The urge is a clock in the audio encoder's position table plus, at most half as strong, a mood that the sound decides.
The encoder starts at the table's top again every 29 s (REFERENCE 6.4): nothing makes the model silent or endless. The
talker has a small, steady chance to end; the vocoder has a level and a pitch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch

from antiphon.models.minicpmo.tiny.weights import Weights, normal


class Signal(IntEnum):
    """A channel of the thinker's states: what the present token is."""

    SOUND = 0
    """Or anything else that has no kind of its own."""
    URGE = 1
    SPEAK = 2
    CLOSING = 3
    CONSONANT = 4
    VOWEL = 5
    SPACE = 6
    STOP = 7
    TURN_END = 8


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids by kind."""

    speak: int
    listen: int
    closing: int
    turn_end: int
    chunk_end: int
    answer_end: int
    space: int
    consonants: tuple[int, ...]
    vowels: tuple[int, ...]
    stops: tuple[int, ...]

    @staticmethod
    def of(vocabulary: Mapping[str, int]) -> Ids:
        """vocabulary: id of every token by its text, bytes as their byte-level characters."""

        def ids(characters: str) -> tuple[int, ...]:
            return tuple(vocabulary[character] for character in characters)

        return Ids(
            speak=vocabulary["<|speak|>"],
            listen=vocabulary["<|listen|>"],
            closing=vocabulary["<|tts_bos|>"],
            turn_end=vocabulary["<|turn_eos|>"],
            chunk_end=vocabulary["<|chunk_eos|>"],
            answer_end=vocabulary["<|im_end|>"],
            space=vocabulary["Ġ"],
            consonants=ids("bdfghjklmnprstvwz"),
            vowels=ids("aeiou"),
            stops=ids(".!?"),
        )


_SIGNAL_SIZE = 4.0
"""Against 1 on every other channel of a token's embedding."""
_URGE_SIZE = 0.5
"""Of the urge when the clock is at its end: weak enough for sampling to decide by chance about every fourth second."""
_WANTED_SIZE = 8.0
"""Of the head's weights for a wanted kind; the states' norm makes logits of about 12 of it, against 0 elsewhere."""
_CHOICE_SPREAD = 0.12
"""Of the head's weights on the other channels: logits differ by 1 or 2 within a kind."""
_MIXING, _SHARPNESS = 2.0, 2.6
"""Gain of what layers add to the states, and of queries and keys: enough for the context to outweigh the last token."""


def teach_thinker(main: Weights, ids: Ids) -> None:
    """Put the module's table into embeddings and head. main: weights by official name, changed."""
    signals = slice(len(Signal))
    for name, weight in main.items():
        if name.startswith("llm.model.layers."):
            match name.split(".")[-2]:
                case "q_norm" | "k_norm":
                    weight *= _SHARPNESS
                case "o_proj" | "down_proj":
                    weight *= _MIXING
                    weight[signals] = 0
                case "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj":
                    weight[:, signals] = 0

    table = main["llm.model.embed_tokens.weight"]
    table[:, signals] = 0
    table[:, Signal.SOUND] = _SIGNAL_SIZE
    table[:, Signal.URGE] = -_URGE_SIZE
    for signal, tokens in _kinds(ids):
        table[tokens, signals] = 0
        table[tokens, signal] = _SIGNAL_SIZE
    # The end of a unit, or of a piece of an answer; only the second choice after it is ever looked at.
    table[ids.chunk_end, Signal.URGE] = _URGE_SIZE

    head = main["llm.lm_head.weight"]
    choices = [*ids.consonants, *ids.vowels, *ids.stops, ids.space, ids.chunk_end]
    spread = _CHOICE_SPREAD * normal("choice among a kind", (len(choices), head.shape[1]))
    head.zero_()
    head[choices] = spread
    head[:, signals] = 0
    for signal, tokens, strength in _transitions(ids):
        head[tokens, signal] = strength * _WANTED_SIZE


def _kinds(ids: Ids) -> Iterable[tuple[Signal, list[int]]]:
    return (
        (Signal.SPEAK, [ids.speak]),
        (Signal.CLOSING, [ids.closing]),
        (Signal.CONSONANT, [*ids.consonants]),
        (Signal.VOWEL, [*ids.vowels]),
        (Signal.SPACE, [ids.space]),
        (Signal.STOP, [*ids.stops]),
        (Signal.TURN_END, [ids.turn_end]),
    )


def _transitions(ids: Ids) -> Iterable[tuple[Signal, list[int], float]]:
    """What follows what. A strength above 1 makes up for the larger number of rivals, or for the penalties."""
    return (
        (Signal.SOUND, [ids.speak, ids.listen], 1.0),
        (Signal.URGE, [ids.speak], 0.5),
        (Signal.URGE, [ids.listen], -0.5),
        (Signal.SPEAK, [ids.space], 1.0),
        (Signal.SPACE, [*ids.consonants], 1.0),
        (Signal.CONSONANT, [*ids.vowels], 1.0),
        (Signal.VOWEL, [*ids.consonants], 1.0),
        (Signal.VOWEL, [ids.space, ids.chunk_end], 1.2),
        (Signal.CLOSING, [*ids.stops], 1.0),
        (Signal.STOP, [ids.turn_end], 1.5),
        (Signal.TURN_END, [ids.chunk_end], 2.0),
        # In chats.
        (Signal.SOUND, [ids.space], 0.7),
        (Signal.STOP, [ids.space], 0.7),
        (Signal.SOUND, [ids.answer_end], 0.42),
        (Signal.URGE, [ids.answer_end], 2.0),
    )


_CLOCK = [0, 1]
"""Channels of the audio encoder with the clock and its opposite; the layer norm keeps the sign of their difference."""

_CLOCK_BY_SECOND = (
    *(-0.7, -1.0, -0.3, 0.6, 1.0, 0.4, -0.6, -1.0, -1.0, -0.3, 0.8, 1.0, -0.2, -0.9, -1.0),
    *(-0.5, 0.7, 1.0, 0.3, -0.8, -1.0, -1.0, 0.2, 1.0, 0.6, -0.4, -1.0, -0.8, -1.0, -1.0),
)
"""Above 0 to speak, below to listen."""

_CLOCK_SIZE = 3.0
_MOOD_SHARE = 0.5


def teach_ears(main: Weights) -> None:
    """Let audio embeddings carry the urge to speak. main: weights by official name, changed."""
    for name, weight in main.items():
        if name.startswith("apm.") and name.split(".")[-2] in ("conv2", "out_proj", "fc2"):
            weight[_CLOCK] = 0
    table = main["apm.embed_positions.weight"]
    clock = torch.tensor(_CLOCK_BY_SECOND).repeat_interleave(len(table) // len(_CLOCK_BY_SECOND))
    table[:, _CLOCK] = _CLOCK_SIZE * torch.stack((clock, -clock), dim=1)

    inner, inner_bias, outer, outer_bias = (
        main[f"audio_projection_layer.{name}"]
        for name in ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias")
    )
    time = torch.zeros(inner.shape[1])
    time[_CLOCK] = torch.tensor([0.5, -0.5])
    mood = normal("mood", (inner.shape[1],)) / inner.shape[1] ** 0.5
    mood[_CLOCK] = 0
    # relu(x + 1) - relu(x - 1) - 1 is x, bounded by -1 and 1.
    inner[:4] = torch.stack((time, time, mood, mood))
    inner_bias[:4] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    outer *= 2  # the sound's own part, to be heard among the context
    outer[: len(Signal)] = 0
    outer_bias[: len(Signal)] = 0
    outer_bias[Signal.SOUND] = _SIGNAL_SIZE
    outer[Signal.URGE, :4] = _URGE_SIZE * torch.tensor([1.0, -1.0, _MOOD_SHARE, -_MOOD_SHARE])
    outer_bias[Signal.URGE] = -_URGE_SIZE * (1 + _MOOD_SHARE)


_STEADY = 0
"""A channel of the talker's states that is the same for all its inputs; no layer writes it."""

_STEADY_SIZE = 3.0
_CODE_SPREAD = 2.4
"""Of the logits of codec tokens: enough for the most likely one not to lose to the end all the time."""
_END_SIZE = 3.2
"""Makes the end's logit such that a chunk that may end does so with 2 or 3 % per token."""


def teach_talker(main: Weights) -> None:
    """Codec tokens at random, and now and then an early end. main: weights by official name, changed."""
    for name, weight in main.items():
        if name.startswith("tts.emb_"):
            weight[:, _STEADY] = _STEADY_SIZE
        elif name.startswith("tts.") and name.split(".")[-2] in ("o_proj", "down_proj", "linear2"):
            weight[_STEADY] = 0
    magnitude, direction = (main[f"tts.head_code.0.parametrizations.weight.original{i}"] for i in (0, 1))
    direction[:, _STEADY] = 0
    magnitude[:] = _CODE_SPREAD
    direction[-1, _STEADY] = _END_SIZE
    magnitude[-1] = direction[-1].norm()


_PITCH_HZ, _PITCH_SPREAD_HZ = 150.0, 40.0


def teach_vocoder(hift: Weights) -> None:
    """A pitch like a voice's, heard over the noise, and a level between silence and clipping.

    hift: weights by official name, changed.
    """
    hift["f0_predictor.classifier.bias"][:] = _PITCH_HZ
    hift["f0_predictor.classifier.weight"] *= _PITCH_SPREAD_HZ
    for name, weight in hift.items():
        if name.startswith("source_downs."):
            weight *= 16.0
        elif name.startswith("ups.") and name.endswith("original0"):
            weight *= 0.5
        elif ".convs2." in name and name.endswith("original0"):
            weight *= 0.3
    # The lowest two bins carry what lies below 3 kHz. As large as each other, their means cancel.
    num_bins = len(hift["conv_post.bias"]) // 2
    hift["conv_post.parametrizations.weight.original0"][:num_bins] *= 0.35
    hift["conv_post.bias"][:num_bins] = -3.0
    hift["conv_post.bias"][:2] = -0.4
