"""Tiny random instances of the families of timm that corp reads, each with something of its own."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

SMALL: dict[str, Any] = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "img_size": 32,
    "patch_size": 16,
    "num_classes": 7,
}

STAGES: dict[str, Any] = {
    "depth": None,
    "depths": (2, 1),
    "num_heads": (2, 2),
    "window_size": 4,
    "patch_size": 4,
}

# name → (timm name, arguments besides SMALL; those that are None are not given)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "vit_no_qkv_bias": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "vit_no_proj_bias": ("vit_tiny_patch16_224", {"proj_bias": False}),
    "vit_grayscale": ("vit_tiny_patch16_224", {"in_chans": 1}),
    "vit_augreg_21k": ("vit_small_patch16_224.augreg_in21k", {}),
    "deit": ("deit_tiny_patch16_224", {}),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {}),
    "deit3_layer_scale": ("deit3_small_patch16_224", {}),
    "clip_pre_norm": ("vit_base_patch16_clip_224", {}),
    "clip_quickgelu": ("vit_base_patch16_clip_quickgelu_224", {}),
    "siglip_attention_pool": ("vit_base_patch16_siglip_224", {}),
    "siglip_average_pool": ("vit_base_patch16_siglip_gap_224", {}),
    "gap_no_class_token": ("vit_medium_patch16_gap_240", {}),
    "registers": ("vit_little_patch16_reg4_gap_256", {}),
    "dinov2": ("vit_small_patch14_dinov2", {"patch_size": 14, "img_size": 28}),
    "dinov2_registers": ("vit_small_patch14_reg4_dinov2", {"patch_size": 14, "img_size": 28}),
    "dinov2_swiglu_packed": ("vit_giant_patch14_dinov2", {"patch_size": 14, "img_size": 28, "mlp_ratio": 4.0}),
    "flexivit": ("flexivit_small", {}),
    "res_post_norm": ("vit_base_patch16_rpn_224", {}),
    "wide_head": ("vit_so150m_patch16_reg4_map_256", {}),
    "swiglu": ("vit_tiny_patch16_224", {"mlp_layer": timm.layers.SwiGLU}),
    "qk_norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "scale_norm": ("vit_tiny_patch16_224", {"scale_attn_norm": True, "scale_mlp_norm": True}),
    "dino": ("vit_small_patch16_224.dino", {}),
    "siglip2": ("vit_base_patch16_siglip_256.v2_webli", {}),
    "eva_without_rotation": ("eva_giant_patch14_224", {}),
    "eva02_swiglu_packed": ("eva02_tiny_patch14_224", {}),
    "eva02_separate_qkv_sub_norm": ("eva02_base_patch14_448", {}),
    "eva02_clip_post_norm": ("eva02_enormous_patch14_clip_224", {}),
    "dinov3": ("vit_small_patch16_dinov3", {}),
    "dinov3_swiglu": ("vit_small_plus_patch16_dinov3_qkvb", {}),
    "rope": ("vit_medium_patch16_rope_reg1_gap_256", {}),
    "rope_mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "perception_encoder": ("vit_pe_core_tiny_patch16_384", {}),
    "sapiens2": ("vit_base_patch16_sapiens2", {"num_kv_heads": 2}),
    "beit": ("beit_base_patch16_224", {}),
    "beitv2": ("beitv2_base_patch16_224", {}),
    "sam": ("samvit_base_patch16", {"img_size": 64, "window_size": 3, "global_attn_indexes": [1], "neck_chans": 16}),
    "sam_no_neck": ("samvit_base_patch16_224", {"img_size": 64, "window_size": 3, "global_attn_indexes": [1]}),
    "swin": ("swin_tiny_patch4_window7_224", {**STAGES, "img_size": 40}),
    "swinv2": ("swinv2_tiny_window8_256", STAGES),
}

# one of each way through the code; tests/test_zoo.py runs the others through the same contracts
PATHS = (
    "vit_no_qkv_bias",
    "deit3_layer_scale",
    "siglip_attention_pool",
    "res_post_norm",
    "swiglu",
    "qk_norm",
    "scale_norm",
    "eva02_separate_qkv_sub_norm",
    "dinov3_swiglu",
    "rope_mixed",
    "perception_encoder",
    "sapiens2",
    "beit",
    "sam",
    "swin",
    "swinv2",
)

# those whose tokens keep their place on a grid, and so their windows
GRIDS = ("sam", "sam_no_neck", "swin", "swinv2")

# variant → groups that its adapter must refuse, with a word of the reason
REFUSED: dict[str, dict[str, str]] = {
    "qk_norm": {"qk": "normalise"},
    "scale_norm": {"vo": "normalises", "heads": "normalises", "mlp": "normalises"},
    "eva02_swiglu_packed": {"qk": "rotary"},
    "eva02_separate_qkv_sub_norm": {"qk": "rotary", "mlp": "normalises"},
    **{name: {"qk": "rotary"} for name in ("dinov3", "dinov3_swiglu", "rope", "rope_mixed", "perception_encoder")},
    **{name: {"qk": "products with the queries"} for name in ("sam", "sam_no_neck")},
    "sapiens2": {"qk": "normalise"},
    "swinv2": {"qk": "cosine"},
}


def arguments(variant: str) -> tuple[str, dict[str, Any]]:
    name, extra = VARIANTS[variant]
    return name, {key: value for key, value in {**SMALL, **extra}.items() if value is not None}


def build(variant: str, seed: int = 0) -> nn.Module:
    """The variant with weights large enough that every part of it matters, in eval mode."""
    return noisy(*arguments(variant), seed)


def noisy(name: str, args: dict[str, Any], seed: int = 0) -> nn.Module:
    """Any model of timm with such weights."""
    torch.manual_seed(seed)
    model: nn.Module = timm.create_model(name, pretrained=False, **args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def images(variant: str, count: int = 3, seed: int = 0) -> Tensor:
    _, args = arguments(variant)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, args.get("in_chans", 3), args["img_size"], args["img_size"], generator=generator)


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    """The output of `model` on images, without gradients."""
    out = model(x)
    assert isinstance(out, Tensor)
    return out


def require_same(found: Tensor, expected: Tensor) -> None:
    """Within rounding: modules with the same bits may run other kernels, on this machine or on another."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
