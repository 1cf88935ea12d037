"""Tiny random instances of timm's VisionTransformer family, each with something of its own."""

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

# name → (timm name, arguments besides SMALL)
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
}

# variant → groups that its adapter must refuse, with a word of the reason
REFUSED: dict[str, dict[str, str]] = {
    "qk_norm": {"qk": "normalise"},
    "scale_norm": {"vo": "normalises", "heads": "normalises", "mlp": "normalises"},
}


def arguments(variant: str) -> tuple[str, dict[str, Any]]:
    name, extra = VARIANTS[variant]
    return name, {**SMALL, **extra}


def build(variant: str, seed: int = 0) -> nn.Module:
    """The variant with weights large enough that every part of it matters, in eval mode."""
    torch.manual_seed(seed)
    name, args = arguments(variant)
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
