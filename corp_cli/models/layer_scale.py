"""LayerScale as part of the linear layer before it: a GPU multiplies by a vector slower than it adds whole streams."""

from __future__ import annotations

import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Block
from corp_cli.models.sublayers import SUBLAYERS

MODULES, VECTORS = ("ls1", "ls2"), ("gamma_1", "gamma_2")  # of timm's Block, and of EvaBlock and BEiT's


def has_layer_scale(block: nn.Module) -> bool:
    """Whether γ (arXiv 2103.17239) multiplies what a branch of `block` adds to the stream."""
    modules = any(isinstance(getattr(block, name, None), LayerScale) for name in MODULES)
    return modules or any(getattr(block, name, None) is not None for name in VECTORS)


def folds(block: Block, module: nn.Module) -> bool:
    """Whether a pruned model has the LayerScale of this dense block in its linear layers: corp reads both branches."""
    return has_layer_scale(module) and type(module) in SUBLAYERS and block.sizes.heads > 0 and block.sizes.mlp > 0


def drop_layer_scale(block: nn.Module) -> None:
    """Let the branches of `block` be added as they are."""
    for name in MODULES:
        if isinstance(getattr(block, name, None), LayerScale):
            setattr(block, name, nn.Identity())
    for name in VECTORS:
        if getattr(block, name, None) is not None:
            setattr(block, name, None)


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def fold_layer_scale(model: nn.Module) -> None:
    """γ (W x + b) = (γW) x + γb: the last linear layer of both branches takes γ in, in every block that has one.

    The same model within the rounding of its weights; tensors that it shares with another model stay as they are.
    Blocks of which corp cannot read both branches keep their γ.
    """
    for block in blocks_of(model):
        module = model.get_submodule(block.name)
        if not folds(block, module):
            continue
        for branch in SUBLAYERS[type(module)](module, {}):
            if isinstance(branch.gain, Tensor):
                _scale_rows(branch.output, branch.gain)
        drop_layer_scale(module)


def _scale_rows(linear: nn.Linear, gain: Tensor) -> None:
    weight, bias = linear.weight, linear.bias
    linear.weight = nn.Parameter(weight.detach() * gain[:, None], weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach() * gain, bias.requires_grad)
