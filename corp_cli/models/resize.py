"""The sizes of a pruned model, read from it and put on a dense skeleton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn

from corp_cli.models.adapter import blocks_of, resize_attention, resize_mlp
from corp_cli.models.attention import AttentionSizes, PrunedAttention


@dataclass(frozen=True)
class MlpSizes:
    """What a pruned MLP is built from besides the dense module."""

    hidden: int
    fc2_bias: bool


@dataclass(frozen=True)
class PrunedSizes:
    """Sizes of one block; None where the module is as in the dense model."""

    attn: AttentionSizes | None = None
    mlp: MlpSizes | None = None


def pruned_sizes(pruned: nn.Module, dense: nn.Module) -> dict[str, PrunedSizes]:
    """block name → sizes, for the blocks of `pruned` that differ from those of `dense`."""
    found = {}
    for new, old in zip(blocks_of(pruned), blocks_of(dense), strict=True):
        attn = mlp = None
        module = pruned.get_submodule(new.attn)
        if isinstance(module, PrunedAttention):
            biases = module.qkv.bias is not None, module.proj.bias is not None
            attn = AttentionSizes(new.sizes.heads, new.sizes.qk, new.sizes.vo, new.scale, *biases)
        if new.sizes.mlp != old.sizes.mlp:
            fc2 = cast(nn.Linear, pruned.get_submodule(f"{new.mlp}.fc2"))
            mlp = MlpSizes(new.sizes.mlp, fc2.bias is not None)
        if attn or mlp:
            found[new.name] = PrunedSizes(attn, mlp)
    return found


def resize(dense: nn.Module, sizes: dict[str, PrunedSizes]) -> None:
    """Give the blocks of a dense skeleton the sizes of a pruned model; new tensors are left uninitialised."""
    for block in blocks_of(dense):
        new = sizes.get(block.name, PrunedSizes())
        if new.mlp is not None:
            resize_mlp(dense, block, new.mlp.hidden, new.mlp.fc2_bias)
        if new.attn is not None:
            resize_attention(dense, block, new.attn)
