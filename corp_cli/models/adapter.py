"""Adapter for timm's vision transformers: model ↔ Blocks and weights. Does no maths."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.models.attention.plain import PrunedAttention
from corp_cli.models.blocks import ATTENTION_GROUPS, AttentionWeights, Block, BlockWeights, MlpWeights, Sizes
from corp_cli.models.kinds import KINDS, assign_per_head, per_head, qkv_rows, refused, unreadable
from corp_cli.models.spec import AttentionSizes

STAGED = SwinTransformer, SwinTransformerV2  # their blocks are in stages
REFUSED = {
    "ByobNet": "is built of convolutions (in MobileViT, with small transformers between them)",
    "Levit": "norms the queries, keys and values of its attention over the batch",
    "LevitDistilled": "norms the queries, keys and values of its attention over the batch",
    "MultiScaleVit": "pools queries, keys and values over space inside of its attention",
    "PyramidVisionTransformerV2": "has convolutions inside of its attention and its MLP",
    "SwinTransformerV2Cr": "is built otherwise than timm's other Swin transformers; corp prunes swin_* and swinv2_*",
}


def blocks_of(model: nn.Module) -> tuple[Block, ...]:
    """The transformer blocks of `model`, first to last. Raises CorpError where there are none that corp can read."""
    names = block_names(model)
    if not names:
        kind = type(model).__name__
        raise CorpError(
            f"{kind} {REFUSED.get(kind, 'has no `blocks` of attention and MLP')}, so corp cannot prune it; the README "
            "lists the families of timm that it prunes (ViT, DeiT, DINO, EVA-02, SigLIP, CLIP, BEiT, Swin, SAM)."
        )
    return tuple(_read_block(model, name) for name in names)


def block_names(model: nn.Module) -> list[str]:
    """The paths of the blocks, first to last; none where corp does not know where they are."""
    children = getattr(model, "blocks", None)
    if isinstance(children, nn.Sequential | nn.ModuleList):
        return [f"blocks.{i}" for i in range(len(children))]
    if isinstance(model, STAGED):
        stages = enumerate(cast(nn.Sequential, model.layers))
        return [f"layers.{i}.blocks.{j}" for i, stage in stages for j in range(len(cast(nn.Sequential, stage.blocks)))]
    return []


def _read_block(model: nn.Module, name: str) -> Block:
    module = model.get_submodule(name)
    attn, mlp = getattr(module, "attn", None), getattr(module, "mlp", None)
    if not isinstance(attn, nn.Module) or not isinstance(mlp, nn.Module):
        raise CorpError(
            f"{name} is a {type(module).__name__}, whose attention and MLP are not separate; "
            "corp cannot prune this model."
        )
    hidden = heads = qk = vo = 0
    scale = 1.0
    if refusal := unreadable(attn):
        refusals = dict.fromkeys(ATTENTION_GROUPS, refusal)
    else:
        refusals = refused(attn, model)
        heads, scale = cast(int, attn.num_heads), cast(float, getattr(attn, "scale", 1.0))
        vo = _linear(attn, "proj").in_features // heads
        qk = cast(int, getattr(attn, "qk_dim", vo))
    if refusal := _refuse_mlp(mlp):
        refusals["mlp"] = refusal
    else:
        hidden = _linear(mlp, "fc2").in_features
    place = f"{name.rpartition('.')[0]}, window {getattr(module, 'window_size', None)}"
    bare, sizes = not (type(attn) in KINDS and KINDS[type(attn)].biased), Sizes(hidden, qk, vo, heads)
    return Block(name, f"{name}.attn", f"{name}.mlp", sizes, scale, refusals, place, bare)


def _refuse_mlp(mlp: nn.Module) -> str | None:
    if type(mlp) not in (Mlp, GluMlp, SwiGLU):
        return f"{type(mlp).__name__} is not an MLP of two linear layers"
    if not isinstance(mlp.norm, nn.Identity):
        return "mlp.norm normalises over all hidden channels"
    if not isinstance(mlp.fc2, nn.Linear):
        return f"{type(mlp.fc2).__name__} is not a linear layer"
    return None


def _linear(module: nn.Module, name: str) -> nn.Linear:
    return cast(nn.Linear, getattr(module, name))


def _stack(linears: tuple[Tensor | None, ...]) -> Tensor | None:
    """Several biases one below the other; None when there are none."""
    given = [t.flatten() for t in linears if t is not None]
    return torch.cat(given) if given else None


def _double(tensor: Tensor) -> Tensor:
    """Detached, in float64, where the device has it (MPS has not)."""
    tensor = tensor.detach()
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def block_weights(model: nn.Module, block: Block) -> BlockWeights:
    """The weights of a block as the stages see them."""
    attn = attention_weights(model, block) if block.sizes.heads else None
    return BlockWeights(attn, mlp_weights(model, block) if block.sizes.mlp else None)


# --- attention ------------------------------------------------------------------------------------------------


def attention_weights(model: nn.Module, block: Block) -> AttentionWeights:
    """The projections of a block's attention, split by head, in float64."""
    attn = model.get_submodule(block.attn)
    (weight, bias), proj, s = qkv_rows(attn), _linear(attn, "proj"), block.sizes
    widths = s.qk, s.qk, s.vo

    def by_head(rows: Tensor) -> list[Tensor]:
        parts = _double(rows).split([s.heads * width for width in widths])
        return [part.unflatten(0, (s.heads, width)) for part, width in zip(parts, widths, strict=True)]

    q, k, v = by_head(weight)
    biases: Sequence[Tensor | None] = [None] * 3 if bias is None else by_head(bias)
    q_bias, k_bias, v_bias = biases
    out = _double(proj.weight).unflatten(1, (s.heads, s.vo))
    out_bias = None if proj.bias is None else _double(proj.bias)
    return AttentionWeights(q, k, v, q_bias, k_bias, v_bias, out, out_bias, per_head(attn))


def replace_attention(model: nn.Module, block: Block, weights: AttentionWeights) -> None:
    """Put a PrunedAttention with these weights in the place of the block's attention, in the dense dtype."""
    (heads, qk, _), vo = weights.q.shape, weights.v.shape[1]
    biases = weights.q_bias is not None, weights.proj_bias is not None
    attn = resize_attention(model, block, AttentionSizes(heads, qk, vo, block.scale, *biases))
    rows = torch.cat([part.flatten(0, 1) for part in (weights.q, weights.k, weights.v)])
    _assign(attn.qkv, rows, _stack((weights.q_bias, weights.k_bias, weights.v_bias)))
    _assign(attn.proj, weights.proj.flatten(1), weights.proj_bias)
    assign_per_head(attn, weights.per_head)


def resize_attention(model: nn.Module, block: Block, sizes: AttentionSizes) -> PrunedAttention:
    """Put an uninitialised PrunedAttention of these sizes in the place of the block's attention."""
    dense = model.get_submodule(block.attn)
    attn = KINDS[type(dense)].pruned(dense, sizes).train(dense.training)
    put_module(model, block.attn, attn)
    return attn


# --- MLP ------------------------------------------------------------------------------------------------------


def _fc1_names(mlp: nn.Module) -> tuple[str, ...]:
    return ("fc1_g", "fc1_x") if isinstance(mlp, SwiGLU) else ("fc1",)


def mlp_weights(model: nn.Module, block: Block) -> MlpWeights:
    """The linear layers of a block's MLP, in float64. A gated MLP gives two fc1, value and gate in timm's order."""
    mlp = model.get_submodule(block.mlp)
    fc2 = _linear(mlp, "fc2")
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    for name in _fc1_names(mlp):
        fc1 = _linear(mlp, name)
        parts = fc1.out_features // fc2.in_features  # 2 where a packed fc1 holds value and gate
        weights += _double(fc1.weight).chunk(parts)
        biases += [None] * parts if fc1.bias is None else _double(fc1.bias).chunk(parts)
    bias = None if fc2.bias is None else _double(fc2.bias)
    return MlpWeights(tuple(weights), tuple(biases), _double(fc2.weight), bias)


def hidden_units(model: nn.Module, block: Block) -> Callable[..., Tensor]:
    """What a block's MLP makes of its pre-activations, one for each fc1 of `mlp_weights`: its hidden units."""
    mlp: Any = model.get_submodule(block.mlp)
    if isinstance(mlp, SwiGLU):
        return lambda gate, value: mlp.act(gate) * value
    if isinstance(mlp, GluMlp):
        return lambda a, b: a * mlp.act(b) if mlp.gate_last else mlp.act(a) * b
    act: Callable[..., Tensor] = mlp.act
    return act


def replace_mlp(model: nn.Module, block: Block, weights: MlpWeights) -> None:
    """Put linear layers with these weights in the place of the MLP's, in the dense dtype."""
    mlp = resize_mlp(model, block, weights.fc2.shape[1], weights.fc2_bias is not None)
    names = _fc1_names(mlp)
    per_layer = len(weights.fc1) // len(names)
    for i, name in enumerate(names):
        part = slice(i * per_layer, (i + 1) * per_layer)
        _assign(_linear(mlp, name), torch.cat(weights.fc1[part]), _stack(weights.fc1_bias[part]))
    _assign(_linear(mlp, "fc2"), weights.fc2, weights.fc2_bias)


def resize_mlp(model: nn.Module, block: Block, hidden: int, fc2_bias: bool) -> nn.Module:
    """Put uninitialised linear layers with `hidden` channels in the place of the MLP's."""
    mlp = model.get_submodule(block.mlp)
    fc2 = _linear(mlp, "fc2")
    for name in _fc1_names(mlp):
        fc1 = _linear(mlp, name)
        rows = hidden * (fc1.out_features // fc2.in_features)
        setattr(mlp, name, _empty(fc1.in_features, rows, fc1.bias is not None, fc1.weight))
    mlp.fc2 = _empty(hidden, fc2.out_features, fc2_bias, fc2.weight)
    return mlp


# --- modules --------------------------------------------------------------------------------------------------


def sharing(model: nn.Module) -> nn.Module:
    """A copy with the tensors of `model`: modules of either can be replaced, and nothing is in memory twice."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def put_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` in the place of the one at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _empty(inputs: int, outputs: int, bias: bool, like: Tensor) -> nn.Linear:
    made: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=like.device, dtype=like.dtype)
    return made


@torch.no_grad()
def _assign(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
