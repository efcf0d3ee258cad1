"""The dimensions of the released MiniCPM-o 4.5, and `config.json` and `flow.yaml` of a model of any dimensions.

The inverse of `config.py` and `flow_config.py`: what is made here is read there as the same dataclasses. Not the
released files: fields that those readers do not look at are left out. Shown by tests/bench/test_loading.py.
"""

from __future__ import annotations

from antiphon.models.minicpmo.config import AudioConfig, DecoderConfig, TalkerConfig, ThinkerConfig, VisionConfig
from antiphon.models.minicpmo.flow_config import EncoderConfig, EstimatorConfig, FlowConfig
from antiphon.models.minicpmo.hift_config import Generation, HiftConfig
from antiphon.models.minicpmo.model import ModelConfig

RELEASED = ModelConfig(
    thinker=ThinkerConfig(DecoderConfig(4096, 36, 32, 8, 128, 12288, 1e6, 1e-6, has_qk_norm=True), 151748, 40960),
    vision=VisionConfig(1152, 27, 16, 4304, 14, 3, 980, 1e-6, 64, 448, 4096, 16),
    num_vision_layers=27,
    audio=AudioConfig(1024, 24, 16, 4096, 80, 1500, 5, 1.0, 4096),
    talker=TalkerConfig(
        DecoderConfig(768, 20, 12, 12, 64, 3072, 1e4, 1e-6, has_qk_norm=False), 4096, 152064, 6562, 151687, 4096, 151692
    ),
    flow=FlowConfig(
        6561, 80, 192, 0.7, EncoderConfig(512, 6, 4, 8, 2048, 3, 2), EstimatorConfig(320, 512, 16, 8, 64, 2048)
    ),
    hift=HiftConfig(Generation.V1_0_5, 80, 512, 9, 512, 5, (16, 11, 7), (7, 7, 11), (3, 7, 11)),
)
"""REFERENCE 1."""


def config_document(config: ModelConfig) -> dict[str, object]:
    """What `config.json` says."""
    vision, audio, talker = config.vision, config.audio, config.talker
    return {
        "architectures": ["MiniCPMO"],
        "model_type": "minicpmo",
        "version": "4.5",
        **_decoder(config.thinker.decoder, config.thinker.max_position_tokens),
        "vocab_size": config.thinker.vocab_size,
        "sliding_window": None,
        "query_num": vision.query_num,
        "vision_batch_size": vision.max_batch_images,
        "slice_config": {"patch_size": vision.patch_size, "scale_resolution": vision.scale_resolution},
        "vision_config": {
            "hidden_size": vision.hidden_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "intermediate_size": vision.intermediate_size,
            "patch_size": vision.patch_size,
            "num_channels": vision.num_channels,
            "image_size": vision.image_size,
            "layer_norm_eps": vision.layer_norm_eps,
            "hidden_act": "gelu_pytorch_tanh",
        },
        "audio_pool_step": audio.pool_step,
        "audio_chunk_length": audio.chunk_length_s,
        "audio_config": {
            "d_model": audio.hidden_size,
            "encoder_layers": audio.num_layers,
            "encoder_attention_heads": audio.num_heads,
            "encoder_ffn_dim": audio.intermediate_size,
            "num_mel_bins": audio.num_mel_bins,
            "max_source_positions": audio.max_positions,
            "activation_function": "gelu",
        },
        "tts_config": {
            **_decoder(talker.decoder, talker.max_position_tokens),
            "llm_dim": talker.llm_hidden_size,
            "num_text_tokens": talker.num_text_tokens,
            "num_audio_tokens": talker.num_codec_tokens,
            "audio_bos_token_id": talker.audio_bos_id,
            "text_eos_token_id": talker.text_eos_id,
            "num_vq": 1,
            "projector_type": "mlp",
            "condition_type": "hidden_text_merge",
            "normalize_projected_hidden": True,
            "attention_type": "full_attention",
        },
    }


def flow_document(config: FlowConfig) -> dict[str, object]:
    """What `flow.yaml` says, without the tags that name Python classes."""
    encoder, estimator = config.encoder, config.estimator
    return {
        "flow": {
            "input_size": encoder.hidden_size,
            "output_size": config.num_mel_bins,
            "spk_embed_dim": config.speaker_size,
            "output_type": "mel",
            "vocab_size": config.vocab_size,
            "encoder": {
                "input_size": encoder.hidden_size,
                "output_size": encoder.hidden_size,
                "input_layer": "linear",
                "pre_lookahead_len": encoder.lookahead_tokens,
                "num_blocks": encoder.num_token_layers,
                "num_up_blocks": encoder.num_frame_layers,
                "up_stride": encoder.frames_per_token,
                "up_scale_factor": encoder.frames_per_token,
                "attention_heads": encoder.num_heads,
                "pos_enc_layer_type": "rel_pos_espnet",
                "selfattention_layer_type": "rel_selfattn",
                "key_bias": True,
                "linear_units": encoder.intermediate_size,
                "normalize_before": True,
            },
            "decoder": {
                "inference_cfg_rate": config.cfg_rate,
                "estimator": {
                    "in_channels": estimator.in_channels,
                    "out_channels": config.num_mel_bins,
                    "mlp_ratio": estimator.intermediate_size / estimator.hidden_size,
                    "depth": estimator.num_layers,
                    "num_heads": estimator.num_heads,
                    "head_dim": estimator.head_dim,
                    "hidden_size": estimator.hidden_size,
                },
            },
        }
    }


def _decoder(config: DecoderConfig, max_position_tokens: int) -> dict[str, object]:
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": max_position_tokens,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
    }
