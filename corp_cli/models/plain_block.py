"""Blocks of pruned models whose residual sums are one operation: a GPU that is given few images waits for Python."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import LayerScale
from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn

from corp_cli.models.adapter import blocks_of, put_module
from corp_cli.models.offload import hand_over


class PlainBlock(nn.Module):
    """x + γ₁ attn(norm1(x)), then x + γ₂ mlp(norm2(x)): timm's Block, with its modules and their names.

    The product with γ of LayerScale (arXiv 2103.17239) and the sum are one operation, and what does nothing is not
    called: at batch 1 the time of a pass is that of launching what it consists of, and a larger batch is read and
    written once less.
    """

    attn: Any

    def __init__(self, block: nn.Module) -> None:
        """Takes over the modules of `block`."""
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = map(
            block.get_submodule, ("norm1", "attn", "ls1", "drop_path1")
        )
        self.norm2, self.mlp, self.ls2, self.drop_path2 = map(
            block.get_submodule, ("norm2", "mlp", "ls2", "drop_path2")
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, N, D] → [B, N, D]."""
        masked = attn_mask is not None or is_causal  # which the attention of older versions of timm does not know
        masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal} if masked else {}
        x = added(x, self.attn(self.norm1(x), **masks), self.ls1, self.drop_path1)
        return added(x, self.mlp(self.norm2(x)), self.ls2, self.drop_path2)


def added(x: Tensor, branch: Tensor, scale: nn.Module, drop_path: nn.Module) -> Tensor:
    """x + drop_path(scale(branch)) [B, N, D]."""
    if not isinstance(drop_path, nn.Identity) and drop_path.training:
        return x + drop_path(scale(branch))
    if isinstance(scale, nn.Identity):
        return x + branch
    return torch.addcmul(x, branch, scale.gamma) if isinstance(scale, LayerScale) else x + scale(branch)


def is_plain(module: nn.Module) -> bool:
    """Whether it is a block of timm's VisionTransformer as it comes, or the same of a pruned model."""
    return type(module) in (TimmBlock, PlainBlock)


def put_plain_blocks(model: nn.Module) -> None:
    """Put a PlainBlock in the place of every block of timm's VisionTransformer that is still timm's own."""
    for block in blocks_of(model):
        module: Any = model.get_submodule(block.name)
        if type(module) is TimmBlock:
            new = PlainBlock(module)
            hand_over(module, new)
            put_module(model, block.name, new.train(module.training))
