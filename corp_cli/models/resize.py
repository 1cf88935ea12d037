"""The sizes of a pruned model, read from it and put on a dense skeleton."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from corp_cli.models.adapter import blocks_of, resize_attention, resize_mlp
from corp_cli.models.attention.plain import PrunedAttention
from corp_cli.models.blocks import Block
from corp_cli.models.layer_scale import drop_layer_scale, folds, has_layer_scale
from corp_cli.models.plain_block import put_plain_blocks
from corp_cli.models.spec import AttentionSizes, MlpSizes, PrunedSizes
from corp_cli.models.token_block import TokenBlock, put_token_block


def sizes_from_json(entry: dict[str, Any]) -> PrunedSizes:
    """The sizes of one block from what `asdict` made of them; what an older corp did not know keeps its default."""
    attn, mlp = entry["attn"], entry["mlp"]
    spared = entry.get("tokens"), entry.get("merge"), entry.get("folded", False)
    return PrunedSizes(attn and AttentionSizes(**attn), mlp and MlpSizes(**mlp), *spared)


def pruned_sizes(pruned: nn.Module, dense: nn.Module) -> dict[str, PrunedSizes]:
    """block name → sizes, for the blocks of `pruned` that differ from those of `dense`."""
    found = {}
    for new, old in zip(blocks_of(pruned), blocks_of(dense), strict=True):
        attn = mlp = None
        module = pruned.get_submodule(new.attn)
        if isinstance(module, PrunedAttention):
            biases = module.qkv.bias is not None, module.proj.bias is not None
            attn = AttentionSizes(new.sizes.heads, new.sizes.qk, new.sizes.vo, new.scale, *biases)
        if new.sizes.mlp > 0 and _mlp_sizes(pruned, new) != _mlp_sizes(dense, old):
            mlp = _mlp_sizes(pruned, new)
        whole = pruned.get_submodule(new.name)
        tokens, merge = (whole.updated_tokens, whole.merge) if isinstance(whole, TokenBlock) else (None, None)
        folded = has_layer_scale(dense.get_submodule(old.name)) and not has_layer_scale(whole)
        if attn or mlp or folded:
            found[new.name] = PrunedSizes(attn, mlp, tokens, merge, folded)
    return found


def _mlp_sizes(model: nn.Module, block: Block) -> MlpSizes:
    fc2 = cast(nn.Linear, model.get_submodule(f"{block.mlp}.fc2"))
    return MlpSizes(block.sizes.mlp, fc2.bias is not None)


def resize(dense: nn.Module, sizes: dict[str, PrunedSizes]) -> None:
    """Give the blocks of a dense skeleton the sizes of a pruned model; new tensors are left uninitialised."""
    blocks = blocks_of(dense)
    for block in blocks:
        new, module = sizes.get(block.name, PrunedSizes()), dense.get_submodule(block.name)
        if new.folded and folds(block, module):
            drop_layer_scale(module)
        if new.mlp is not None:
            resize_mlp(dense, block, new.mlp.hidden, new.mlp.fc2_bias)
        if new.attn is not None:
            resize_attention(dense, block, new.attn)
        if new.tokens is not None or new.merge is not None:
            put_token_block(dense, block, new.merge or 0, new.tokens, block == blocks[-1])
    put_plain_blocks(dense)
