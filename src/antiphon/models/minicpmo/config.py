"""Reads `config.json` into frozen dataclasses, one per network. Not the vocoder's: `flow.yaml` is read in `flow.py`.

Every dimension comes from the file; nothing falls back to a library's default, because the released values
differ from those defaults. Source: REFERENCE 1 (our specification of the released config.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from antiphon.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A causal decoder of the Llama family (Qwen3 thinker, Llama talker).

    has_qk_norm: RMSNorm over each head of q and k before the rotation (Qwen3).
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    has_qk_norm: bool


@dataclass(frozen=True, slots=True)
class ThinkerConfig:
    decoder: DecoderConfig
    vocab_size: int
    max_position_tokens: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """num_layers: layers in config.json; the released tower may drop the last one (decided from the checkpoint)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    num_channels: int
    image_size: int
    layer_norm_eps: float
    query_num: int
    scale_resolution: int
    output_size: int
    max_batch_images: int


@dataclass(frozen=True, slots=True)
class AudioConfig:
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_mel_bins: int
    max_positions: int
    pool_step: int
    chunk_length_s: float
    output_size: int


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    decoder: DecoderConfig
    llm_hidden_size: int
    num_text_tokens: int
    num_codec_tokens: int
    audio_bos_id: int
    max_position_tokens: int
    text_eos_id: int


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _Llm(_Part):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int = 40960  # golden folders state only what their networks use
    attention_bias: Literal[False] = False
    tie_word_embeddings: Literal[False] = False
    sliding_window: None = None
    """A number would mask keys by age; no released checkpoint has one and the engine does not do it."""


class _Slices(_Part):
    patch_size: int
    scale_resolution: int


class _Tower(_Part):
    hidden_size: int
    image_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    patch_size: int
    num_channels: int
    layer_norm_eps: float
    hidden_act: Literal["gelu_pytorch_tanh"]


class _Vision(_Part):
    hidden_size: int
    query_num: int
    vision_batch_size: int
    slice_config: _Slices
    vision_config: _Tower


class _Whisper(_Part):
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    num_mel_bins: int
    max_source_positions: int
    activation_function: Literal["gelu"]
    scale_embedding: Literal[False] = False


class _Audio(_Part):
    hidden_size: int
    audio_pool_step: int
    audio_chunk_length: float
    audio_config: _Whisper


class _Tts(_Part):
    llm_dim: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    num_text_tokens: int
    num_audio_tokens: int
    num_vq: Literal[1]
    audio_bos_token_id: int
    text_eos_token_id: int
    max_position_embeddings: int
    projector_type: Literal["mlp"]
    condition_type: Literal["hidden_text_merge"]
    normalize_projected_hidden: Literal[True]
    attention_type: str
    """Read by half-duplex generation only; duplex always attends to the whole turn (REFERENCE 8.3)."""
    rms_norm_eps: float = 1e-6  # LlamaConfig's value; the released file leaves both out (REFERENCE 1.4)
    rope_theta: float = 10000.0


class _Talker(_Part):
    tts_config: _Tts


RawConfig = Mapping[str, object]
PartT = TypeVar("PartT", bound=_Part)


def thinker_config(raw: RawConfig) -> ThinkerConfig:
    """Raises: CheckpointError if a field is missing or has a value that the code does not implement."""
    c = _parse(_Llm, raw)
    decoder = DecoderConfig(
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        rope_theta=c.rope_theta,
        rms_norm_eps=c.rms_norm_eps,
        has_qk_norm=True,
    )
    return ThinkerConfig(decoder, c.vocab_size, c.max_position_embeddings)


def vision_config(raw: RawConfig) -> VisionConfig:
    """Raises: CheckpointError, as `thinker_config`."""
    c = _parse(_Vision, raw)
    tower = c.vision_config
    return VisionConfig(
        hidden_size=tower.hidden_size,
        num_layers=tower.num_hidden_layers,
        num_heads=tower.num_attention_heads,
        intermediate_size=tower.intermediate_size,
        patch_size=tower.patch_size,
        num_channels=tower.num_channels,
        image_size=tower.image_size,
        layer_norm_eps=tower.layer_norm_eps,
        query_num=c.query_num,
        scale_resolution=c.slice_config.scale_resolution,
        output_size=c.hidden_size,
        max_batch_images=c.vision_batch_size,
    )


def audio_config(raw: RawConfig) -> AudioConfig:
    """Raises: CheckpointError, as `thinker_config`."""
    c = _parse(_Audio, raw)
    whisper = c.audio_config
    return AudioConfig(
        hidden_size=whisper.d_model,
        num_layers=whisper.encoder_layers,
        num_heads=whisper.encoder_attention_heads,
        intermediate_size=whisper.encoder_ffn_dim,
        num_mel_bins=whisper.num_mel_bins,
        max_positions=whisper.max_source_positions,
        pool_step=c.audio_pool_step,
        chunk_length_s=c.audio_chunk_length,
        output_size=c.hidden_size,
    )


def talker_config(raw: RawConfig) -> TalkerConfig:
    """Raises: CheckpointError, as `thinker_config`."""
    c = _parse(_Talker, raw).tts_config
    decoder = DecoderConfig(
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.hidden_size // c.num_attention_heads,
        intermediate_size=c.intermediate_size,
        rope_theta=c.rope_theta,
        rms_norm_eps=c.rms_norm_eps,
        has_qk_norm=False,
    )
    return TalkerConfig(
        decoder=decoder,
        llm_hidden_size=c.llm_dim,
        num_text_tokens=c.num_text_tokens,
        num_codec_tokens=c.num_audio_tokens,
        audio_bos_id=c.audio_bos_token_id,
        max_position_tokens=c.max_position_embeddings,
        text_eos_id=c.text_eos_token_id,
    )


def _parse(part: type[PartT], raw: RawConfig) -> PartT:
    try:
        return part.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r:.60})" for e in error.errors()
        )
        raise CheckpointError(f"config.json is not a MiniCPM-o 4.5 configuration: {problems}") from error
