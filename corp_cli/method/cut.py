"""A model cut to the units that stay, and nothing compensated: what the repair is compared with."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from corp_cli.method.compensate import only_heads, replace_block
from corp_cli.method.keep import KeptUnits
from corp_cli.models.adapter import block_weights
from corp_cli.models.blocks import Block, BlockWeights
from corp_cli.models.offload import visit


def selected(dense: BlockWeights, kept: KeptUnits) -> BlockWeights:
    """The weights of one block of `kept` alone, nothing compensated; attn or mlp is None where nothing is pruned."""
    attn, mlp = dense.attn, dense.mlp
    if attn is not None and kept.attn is not None:
        heads, qk, vo = (index.to(attn.proj.device) for index in (kept.attn.heads, kept.attn.qk, kept.attn.vo))
        values, proj, each = attn.v[heads], attn.proj[:, heads], torch.arange(len(heads), device=heads.device)[:, None]
        v_bias = None if attn.v_bias is None else attn.v_bias[heads][each, vo]
        attn = only_heads(attn, heads)
        q_bias, k_bias = (None if bias is None else bias[each, qk] for bias in (attn.q_bias, attn.k_bias))
        attn = replace(attn, q=attn.q[each, qk], k=attn.k[each, qk], q_bias=q_bias, k_bias=k_bias)
        attn = replace(attn, v=values[each, vo], v_bias=v_bias, proj=proj[:, each, vo])
    if mlp is not None and kept.mlp is not None:
        units = kept.mlp.to(mlp.fc2.device)
        fc1_bias = tuple(None if bias is None else bias[units] for bias in mlp.fc1_bias)
        mlp = replace(mlp, fc1=tuple(weight[units] for weight in mlp.fc1), fc1_bias=fc1_bias, fc2=mlp.fc2[:, units])
    return BlockWeights(attn if kept.attn else None, None if kept.mlp is None else mlp)


def only(model: nn.Module, blocks: tuple[Block, ...], kept: tuple[KeptUnits, ...]) -> nn.Module:
    """A copy of `model` cut to `kept`, nothing compensated."""
    pruned = copy.deepcopy(model)
    for block, units in zip(visit(blocks, model, pruned), kept, strict=True):
        replace_block(pruned, block, selected(block_weights(model, block), units))
    return pruned.eval()
