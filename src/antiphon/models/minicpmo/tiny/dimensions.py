"""How large the tiny checkpoint is: config.json, flow.yaml, the vocoder's sizes, the vocabulary.

Field names and fixed values are the released ones (REFERENCE 1); sizes are small and fit each other.
"""

from __future__ import annotations

from tokenizers import pre_tokenizers

from antiphon.models.minicpmo.hift_config import Generation, HiftConfig

BYTES = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))
"""Byte-level characters, one per byte; the first ids, so that any text has ids."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "<unit>",
    "</unit>",
    "<|audio_start|>",
    "<|audio|>",
    "<|audio_end|>",
    "<|spk_bos|>",
    "<|spk|>",
    "<|spk_eos|>",
    "<|tts_bos|>",
    "<|tts_eos|>",
    "<|listen|>",
    "<|speak|>",
    "<|interrupt|>",
    "<|turn_bos|>",
    "<|turn_eos|>",
    "<|chunk_eos|>",
    "<|chunk_bos|>",
    "<|chunk_tts_bos|>",
    "<|chunk_tts_eos|>",
    "<|tts_pad|>",
    "<unk>",
)

_VOCAB_SIZE = len(BYTES) + len(SPECIAL_TOKENS)
_HIDDEN_SIZE = 128

CONFIG: dict[str, object] = {
    "antiphon_tiny": True,
    "architectures": ["MiniCPMO"],
    "model_type": "minicpmo",
    "version": "4.5",
    "hidden_size": _HIDDEN_SIZE,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "init_vision": True,
    "init_audio": True,
    "init_tts": True,
    "stream_input": True,
    "query_num": 64,
    "image_size": 448,
    "drop_vision_last_layer": False,
    "batch_vision_input": True,
    "use_image_id": True,
    "vision_batch_size": 16,
    "slice_config": {"max_slice_nums": 1, "patch_size": 14, "scale_resolution": 448},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "image_size": 980,
        "intermediate_size": 96,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "patch_size": 14,
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "audio_pool_step": 5,
    "audio_chunk_length": 1.0,
    "audio_config": {
        "model_type": "whisper",
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "activation_function": "gelu",
        "scale_embedding": False,
    },
    "tts_config": {
        "model_type": "minicpmtts",
        "backbone_model": "llama",
        "llm_dim": _HIDDEN_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "num_text_tokens": _VOCAB_SIZE,
        "num_audio_tokens": 6562,
        "num_vq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "projector_type": "mlp",
        "condition_type": "hidden_text_merge",
        "normalize_projected_hidden": True,
        "attention_type": "full_attention",
        "audio_tokenizer_type": "s3tokenizer",
        "audio_bos_token_id": len(BYTES) + SPECIAL_TOKENS.index("<|turn_bos|>"),
        "text_eos_token_id": len(BYTES) + SPECIAL_TOKENS.index("<|tts_eos|>"),
    },
}

FLOW_YAML = """\
flow: !new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec
    input_size: 32
    output_size: 80
    spk_embed_dim: 192
    output_type: "mel"
    vocab_size: 6561
    encoder: !new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2
        input_size: 32
        output_size: 32
        input_layer: "linear"
        pre_lookahead_len: 3
        num_blocks: 2
        num_up_blocks: 1
        up_stride: 2
        up_scale_factor: 2
        attention_heads: 4
        pos_enc_layer_type: "rel_pos_espnet"
        selfattention_layer_type: "rel_selfattn"
        key_bias: true
        linear_units: 64
        normalize_before: true
    decoder: !new:cosyvoice2.flow.flow_matching.CausalConditionalCFM
        inference_cfg_rate: 0.7
        estimator: !new:cosyvoice2.flow.decoder_dit.DiT
            in_channels: 320
            out_channels: 80
            mlp_ratio: 4.0
            depth: 2
            num_heads: 2
            head_dim: 32
            hidden_size: 48
"""

HIFT = HiftConfig(
    generation=Generation.V1_0_5,
    num_mel_bins=80,
    base_channels=32,
    num_harmonics=9,
    pitch_channels=32,
    num_pitch_convs=5,
    upsampling_kernels=(16, 11, 7),
    source_resblock_kernels=(7, 7, 11),
    resblock_kernels=(3, 7, 11),
)
