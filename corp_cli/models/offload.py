"""Blocks that stay on the host and come to the device one at a time, for models that do not fit it. Does no maths.

The rest of such a model is on the device all along. A block comes in float32, whatever it is kept in, while `visit`
holds it or while its forward runs: whoever runs the model need not know.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corp_cli.models.adapter import block_names
from corp_cli.models.blocks import Block

WORKED_IN = torch.float32
HOST = torch.device("cpu")
HOME = "corp_home"  # the attribute of a block that comes and goes


@dataclass
class Home:
    """Where a block works, the dtype of its weights on the host, and how many hold it on the device now.

    kept: (tensor, its content on the host, its version) while it is away: only what has changed is copied back.
    """

    device: torch.device
    dtype: torch.dtype
    users: int = 0
    hooks: list[RemovableHandle] = field(default_factory=list)
    kept: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)


def keep_on_host(model: nn.Module, device: torch.device) -> None:
    """From now on the blocks of `model` come to `device` one at a time; the rest goes there for good, in float32."""
    dtype = next(model.parameters()).dtype
    blocks = [model.get_submodule(name) for name in block_names(model)]
    inside = {id(tensor) for block in blocks for tensor in _tensors(block)}
    for tensor in _tensors(model):
        tensor.data = tensor.data.to(HOST) if id(tensor) in inside else _worked_in(tensor, device)
    for block in blocks:
        _follow(block, Home(device, dtype))


def bring_together(model: nn.Module) -> None:
    """All of a model that `keep_on_host` has parted is on the host again, its weights in the dtype that they had."""
    if (dtype := kept_in(model)) is None:
        return
    for block in (model.get_submodule(name) for name in block_names(model)):
        for handle in getattr(block, HOME).hooks:
            handle.remove()
        delattr(block, HOME)
    for tensor in _tensors(model):
        tensor.data = _kept_as(tensor, dtype)


def on_host(model: nn.Module) -> nn.Module:
    """`model` itself where all of it is on the host, or else a copy that is."""
    tensors = {id(tensor): tensor for tensor in _tensors(model)}
    if all(tensor.device == HOST for tensor in tensors.values()):
        return model
    copies = {key: _on_host(tensor) for key, tensor in tensors.items()}
    return copy.deepcopy(model, copies)  # which takes them for what they are of


def kept_in(model: nn.Module) -> torch.dtype | None:
    """The dtype of a model whose blocks stay on the host; None of any other."""
    names = block_names(model)
    home: Home | None = getattr(model.get_submodule(names[0]), HOME, None) if names else None
    return home.dtype if home else None


def visit(blocks: Iterable[Block], *models: nn.Module) -> Iterator[Block]:
    """Every block in turn; those of `models` that stay on the host are on the device meanwhile."""
    for block in blocks:
        homes = [module for model in models if hasattr(module := model.get_submodule(block.name), HOME)]
        try:
            for module in homes:
                _enter(module)
            yield block
        finally:
            for module in homes:
                _leave(module)


def hand_over(old: nn.Module, new: nn.Module) -> None:
    """Let `new`, which takes the place of the block `old`, come and go as that does."""
    if home := getattr(old, HOME, None):
        _follow(new, Home(home.device, home.dtype))


# --- one block ------------------------------------------------------------------------------------------------


def _follow(block: nn.Module, home: Home) -> None:
    setattr(block, HOME, home)
    home.hooks = [block.register_forward_pre_hook(_enter), block.register_forward_hook(_leave, always_call=True)]


@torch.inference_mode(False)  # what comes is as ordinary as what stays
def _enter(block: nn.Module, *_: Any) -> None:
    home: Home = getattr(block, HOME)
    home.users += 1
    if home.users == 1:
        tensors = list(_tensors(block))
        home.kept = [(tensor, tensor.data, tensor._version) for tensor in tensors]
        for tensor in tensors:
            tensor.data = _worked_in(tensor, home.device)


@torch.inference_mode(False)
def _leave(block: nn.Module, *_: Any) -> None:
    home: Home = getattr(block, HOME)
    home.users = max(0, home.users - 1)
    if home.users == 0:
        same = {id(tensor): content for tensor, content, version in home.kept if tensor._version == version}
        left = [tensor for tensor, _, _ in home.kept]  # the block too, while others still have them
        for tensor in {id(tensor): tensor for tensor in (*left, *_tensors(block))}.values():
            tensor.data = same.get(id(tensor), _kept_as(tensor, home.dtype))
        home.kept = []


def _on_host(tensor: Tensor) -> Tensor:
    there = tensor.detach().to(HOST)
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _worked_in(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.data.to(device)
    narrow = tensor.element_size() <= WORKED_IN.itemsize  # so it travels: what takes the time is the way
    return (tensor.data if narrow else tensor.data.to(WORKED_IN)).to(device).to(WORKED_IN)


def _kept_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """On the host; buffers, such as the frequencies of positions, may be more exact than weights."""
    return tensor.data.to(HOST, dtype if isinstance(tensor, nn.Parameter) else None)
