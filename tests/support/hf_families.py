"""Small random models of Transformers families that consist of several models or need other inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from support.hf import DECODER, MADE, MIXED, TOWER, VOCABULARY, tokens

IMAGE, VIDEO, LENGTH = 1, 2, 23
Built = tuple[Any, dict[str, Tensor]]
TEXT = {**DECODER, "eos_token_id": 0, "bos_token_id": 0}
VISION = {**TOWER, "image_size": 16, "patch_size": 8}  # 4 patches
GEMMA4_VISION = {
    **TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 6, "head_dim": 8, "patch_size": 4,
    "pooling_kernel_size": 1,
}  # fmt: skip


def _model(kind: str, config: Any) -> Any:
    return getattr(hf, kind)._from_config(config, attn_implementation="eager").eval()


def _with_image(count: int) -> Tensor:
    """Returns token ids (1, LENGTH) in which an image takes the place of `count` tokens."""
    ids = tokens(1, LENGTH)
    ids[:, 2 : 2 + count] = IMAGE
    return ids


def hubert() -> Built:
    config = hf.HubertConfig(
        **TOWER, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, vocab_size=32,
    )  # fmt: skip
    return _model("HubertForCTC", config), {"input_values": torch.randn(2, 400)}


def llava_onevision() -> Built:
    config = hf.LlavaOnevisionConfig(
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        text_config={**TEXT, "model_type": "qwen2"}, image_token_index=IMAGE, video_token_index=VIDEO,
        image_grid_pinpoints=[[16, 16]], vision_feature_layer=-1,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(1, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    model = _model("LlavaOnevisionForConditionalGeneration", config)
    return model, {"input_ids": _with_image(10), **images}


def got_ocr2() -> Built:
    config = hf.GotOcr2Config(
        vision_config={
            "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 64, "patch_size": 4, "mlp_dim": 40, "window_size": 3, "global_attn_indexes": [1],
        },
        text_config={**TEXT, "model_type": "qwen2"}, image_token_index=IMAGE,
    )  # fmt: skip
    model = _model("GotOcr2ForConditionalGeneration", config)
    return model, {"input_ids": _with_image(16), "pixel_values": torch.randn(1, 3, 64, 64)}


def video_llava() -> Built:
    config = hf.VideoLlavaConfig(
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        text_config={**TEXT, "model_type": "llama"}, image_token_index=IMAGE, video_token_index=VIDEO,
        image_seq_length=4, video_seq_length=8,
    )  # fmt: skip
    model = _model("VideoLlavaForConditionalGeneration", config)
    return model, {"input_ids": _with_image(4), "pixel_values": torch.randn(1, 3, 16, 16)}


def janus() -> Built:
    config = hf.JanusConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "mlp_ratio": 1.0, "projection_dim": 48, "num_image_tokens": 4, "depth": 1},
        vq_config={
            "embed_dim": 8, "num_embeddings": 20, "projection_dim": 48, "image_token_embed_dim": 48,
            "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8,
            "num_patches": 2,
        },
        image_token_id=IMAGE,
    )  # fmt: skip
    model = _model("JanusForConditionalGeneration", config)
    return model, {"input_ids": _with_image(4), "pixel_values": torch.randn(1, 3, 16, 16)}


def colpali() -> Built:
    vlm = hf.PaliGemmaConfig(
        vision_config={**VISION, "model_type": "siglip_vision_model", "projection_dim": 48},
        text_config={**TEXT, "model_type": "gemma", "head_dim": 8}, image_token_index=IMAGE,
        projection_dim=48, hidden_size=48,
    )  # fmt: skip
    model = _model("ColPaliForRetrieval", hf.ColPaliConfig(vlm_config=vlm, embedding_dim=16))
    batch = {"input_ids": _with_image(4), "attention_mask": torch.ones(1, LENGTH, dtype=torch.int64)}
    return model, {**batch, "pixel_values": torch.randn(1, 3, 16, 16)}


def diffusion_gemma() -> Built:
    text = {
        **DECODER, **MIXED, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 16,
        "global_head_dim": 16, "num_global_key_value_heads": 2,
    }  # fmt: skip
    special = {"image_token_id": IMAGE, "boi_token_id": 2, "eoi_token_id": 2}
    config = hf.DiffusionGemmaConfig(
        text_config=text, vision_config=GEMMA4_VISION, canvas_length=8, **special
    )
    model = _model("DiffusionGemmaForBlockDiffusion", config)
    return model, {"input_ids": tokens(1, LENGTH), "decoder_input_ids": tokens(1, 8)}


def qwen2_moe() -> Built:
    """Qwen2-MoE without `use_sliding_window`: the config sets `sliding_window` to 0."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = hf.Qwen2MoeConfig(**DECODER, **sizes, shared_expert_intermediate_size=16)
    return _model("Qwen2MoeForCausalLM", config), {"input_ids": tokens()}


def lightglue() -> Built:
    """LightGlue passes masks (B, 1, 1, Lk)."""
    detector = {
        "model_type": "superpoint", "encoder_hidden_sizes": [32, 32, 32, 64], "decoder_hidden_size": 64,
        "descriptor_decoder_dim": 64, "max_keypoints": 20,
    }  # fmt: skip
    config = hf.LightGlueConfig(
        keypoint_detector_config=detector, descriptor_dim=64, num_hidden_layers=2, num_attention_heads=4
    )
    return _model("LightGlueForKeypointMatching", config), {"pixel_values": torch.rand(1, 2, 3, 32, 48)}


def deepseek_v4() -> Built:
    """DeepSeek-V4, which appends a float bias to its attention mask."""
    kinds = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    config = hf.DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=6, head_dim=16, q_lora_rank=16, qk_rope_head_dim=8, num_experts_per_tok=2,
        n_routed_experts=4, layer_types=["sliding_attention", *kinds], compress_rates=kinds, sliding_window=7,
        o_groups=2, o_lora_rank=8, index_n_heads=2, index_head_dim=8, index_topk=3,
        num_nextn_predict_layers=0, mlp_layer_types=["moe"] * 3,
    )  # fmt: skip
    return _model("DeepseekV4ForCausalLM", config), {"input_ids": tokens()}


def gemma4_audio() -> Built:
    """Gemma 4 with a tower for images and one for audio. The batch is for the audio tower."""
    audio = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 48,
        "subsampling_conv_channels": [8, 8], "attention_chunk_size": 4, "attention_context_left": 3,
    }  # fmt: skip
    config = hf.Gemma4Config(
        text_config=MADE["gemma4"][2], vision_config=GEMMA4_VISION, audio_config=audio, image_token_id=IMAGE,
        audio_token_id=VIDEO,
    )  # fmt: skip
    batch = {"input_features": torch.randn(1, 40, 8), "attention_mask": torch.ones(1, 40, dtype=torch.bool)}
    return _model("Gemma4ForConditionalGeneration", config), batch


AGREE: dict[str, Callable[[], Built]] = {
    f.__name__: f
    for f in (
        hubert, llava_onevision, got_ocr2, video_llava, janus, colpali, diffusion_gemma, qwen2_moe, lightglue,
    )
}  # fmt: skip
