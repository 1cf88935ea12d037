"""The kinds of attention that corp reads: what takes the place of each, and what it does not allow. Does no maths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import AttentionRope
from timm.models import beit, eva, swin_transformer, swin_transformer_v2, vision_transformer, vision_transformer_sam
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corp_cli.models.attention.grid import GridAttention
from corp_cli.models.attention.plain import PlainAttention, PrunedAttention
from corp_cli.models.attention.rotary import RotaryAttention
from corp_cli.models.attention.window import BiasedAttention, CosineAttention, WindowAttention

ROTARY = "rotary positions mix the dimensions of queries and keys"


def _plain(attn: Any, model: Any) -> dict[str, str]:
    return {}


def _rotary(attn: Any, model: Any) -> dict[str, str]:
    return {} if isinstance(model, eva.Eva) and model.rope is None else {"qk": ROTARY}


def _biased(attn: Any, model: Any) -> dict[str, str]:
    shared = getattr(model, "rel_pos_bias", None) is not None
    return {"heads": "all blocks share one relative position bias of all heads"} if shared else {}


def _cosine(attn: Any, model: Any) -> dict[str, str]:
    return {"qk": "cosine attention normalises over all query/key dimensions"}


def _grid(attn: Any, model: Any) -> dict[str, str]:
    if attn.use_rel_pos:
        return {"qk": "its relative positions are products with the queries, over all of their dimensions"}
    return {} if attn.rope is None else {"qk": ROTARY}


@dataclass(frozen=True)
class Kind:
    """What replaces an attention, and what (attention, model) do not allow: group → reason.

    biased: whether something is added to its logits.
    """

    pruned: type[PrunedAttention]
    refuse: Callable[[Any, Any], dict[str, str]]
    biased: bool = False


DENSE: dict[type[nn.Module], Kind] = {
    vision_transformer.Attention: Kind(PlainAttention, _plain),
    eva.EvaAttention: Kind(RotaryAttention, _rotary),
    AttentionRope: Kind(RotaryAttention, _rotary),
    beit.Attention: Kind(BiasedAttention, _biased, biased=True),
    swin_transformer.WindowAttention: Kind(WindowAttention, _plain, biased=True),
    swin_transformer_v2.WindowAttention: Kind(CosineAttention, _cosine, biased=True),
    vision_transformer_sam.Attention: Kind(GridAttention, _grid),
}
KINDS: dict[type[nn.Module], Kind] = {**DENSE, **{kind.pruned: kind for kind in DENSE.values()}}


def unreadable(attn: nn.Module) -> str | None:
    """Why nothing of an attention can be pruned, or None."""
    name = type(attn).__name__
    if getattr(attn, "gate", None) is not None:
        return f"{name} gates its output"
    if getattr(attn, "num_kv_groups", 1) != 1:
        return f"{name} shares keys and values among its heads"
    if type(attn) is beit.Attention and attn.relative_position_bias_table is None:
        return f"{name} has no relative position biases of its own"
    return None if type(attn) in KINDS else f"{name} is not plain multi-head attention"


def refused(attn: nn.Module, model: nn.Module) -> dict[str, str]:
    """group → why it cannot be pruned, of an attention that can be read."""
    found = KINDS[type(attn)].refuse(attn, model)
    if not isinstance(getattr(attn, "q_norm", nn.Identity()), nn.Identity):
        found["qk"] = "q_norm and k_norm normalise over all query/key dimensions"
    if not isinstance(getattr(attn, "norm", nn.Identity()), nn.Identity):
        found.update(dict.fromkeys(("vo", "heads"), "attn.norm normalises over all head outputs"))
    return found


def qkv_rows(attn: Any) -> tuple[Tensor, Tensor | None]:
    """(weight [rows, D], bias [rows]) of queries, keys and values one below the other, however the module holds them.

    timm has one Linear with its bias, one with biases of queries and values beside it, or three of them.
    """
    if attn.qkv is None:
        linears = attn.q_proj, attn.k_proj, attn.v_proj
        weight = torch.cat([linear.weight for linear in linears])
        if all(linear.bias is None for linear in linears):
            return weight, None
        biases = [row.weight.new_zeros(len(row.weight)) if row.bias is None else row.bias for row in linears]
        return weight, torch.cat(biases)
    weight, bias = attn.qkv.weight, attn.qkv.bias
    if getattr(attn, "q_bias", None) is not None:
        bias = torch.cat([attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias])
    return weight, bias


def watch_rows(attn: Any, take: Callable[[Tensor], None]) -> RemovableHandle:
    """From now on `take` gets the queries, keys and values [B, N, rows] of every forward pass."""
    if attn.qkv is not None and getattr(attn, "q_bias", None) is None:
        return attn.qkv.register_forward_hook(lambda module, args, output: take(output))
    # timm then does not call a module whose output they are
    return attn.register_forward_pre_hook(lambda module, args: take(F.linear(args[0], *qkv_rows(module))))


@contextmanager
def rows_of(attn: nn.Module) -> Iterator[list[Tensor]]:
    """While in force, the list holds what `watch_rows` gave last."""
    seen: list[Tensor] = []
    handle = watch_rows(attn, lambda rows: seen.__setitem__(slice(None), [rows]))
    try:
        yield seen
    finally:
        handle.remove()


def per_head(attn: nn.Module) -> dict[str, Tensor]:
    """The tensors that have an entry for every head, heads first; a module that does not count its heads has all."""
    state, heads = attn.state_dict(), torch.arange(int(attn.num_heads))  # type: ignore[arg-type]
    names = KINDS[type(attn)].pruned.PER_HEAD
    return {name: state.get(name, heads).movedim(dim, 0) for name, dim in names.items()}


@torch.no_grad()
def assign_per_head(attn: PrunedAttention, tensors: dict[str, Tensor]) -> None:
    """Write what `per_head` gave, or the part of it that stays."""
    state = attn.state_dict()
    for name, dim in attn.PER_HEAD.items():
        state[name].movedim(dim, 0).copy_(tensors[name])
