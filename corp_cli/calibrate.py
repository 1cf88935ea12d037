"""Stage 1, calibrate: one streaming pass of the dense model over unlabelled images (paper Alg. 1, line 1).

The paper caches activations; here their moments are summed up as they appear, for all blocks in one pass, so memory
does not depend on the number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.linalg.moments import RunningMoments
from corp_cli.models.blocks import Block
from corp_cli.statistics import BlockStatistics, LogitStatistics, Statistics


class _RunningLogits:
    """Sums behind LogitStatistics, in float64."""

    def __init__(self, block: Block, device: torch.device) -> None:
        self.block = block
        heads, d = block.sizes.heads, block.sizes.qk
        self.tokens = self.images = 0
        self.gram_q, self.gram_k = (torch.zeros(heads, d, d, dtype=torch.float64, device=device) for _ in "qk")
        self.energy = torch.zeros(heads, d, dtype=torch.float64, device=device)

    def add(self, qkv: Tensor) -> None:
        """Take in the output [B, N, ...] of attn.qkv."""
        batch, tokens, _ = qkv.shape
        heads, d = self.block.sizes.heads, self.block.sizes.qk
        q, k = qkv[..., : 2 * heads * d].reshape(batch, tokens, 2, heads, d).unbind(2)
        self.energy += (q.square().sum(1).double() * k.square().sum(1).double()).sum(0).to(self.energy)
        for total, x in ((self.gram_q, q), (self.gram_k, k)):
            x = x.permute(2, 0, 1, 3).reshape(heads, batch * tokens, d)
            total += (x.mT @ x).to(total)
        self.tokens += batch * tokens
        self.images += batch

    def result(self) -> LogitStatistics:
        return LogitStatistics(self.gram_q / self.tokens, self.gram_k / self.tokens, self.energy / self.images)


def _input_rows(running: RunningMoments) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        running.add(args[0].flatten(0, -2))

    return hook


def _output(running: _RunningLogits) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        running.add(output)

    return hook


def accumulation_device(device: torch.device) -> torch.device:
    """Where float64 sums are kept: with the model, or on the CPU where the device has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


@torch.inference_mode()
def calibrate(
    model: nn.Module,
    blocks: tuple[Block, ...],
    batches: Iterable[Tensor],
    groups: frozenset[str],
    device: torch.device,
) -> Statistics:
    """Statistics of every block over all images of `batches` [B, C, H, W], for the groups that will be pruned.

    Raises CorpError when activations are not finite, naming the block.
    """
    home = accumulation_device(device)
    running: list[dict[str, Any]] = []
    handles = []
    for block in blocks:
        sums: dict[str, Any] = {}
        if "mlp" in groups and "mlp" not in block.refusals:
            fc2 = cast(nn.Linear, model.get_submodule(f"{block.mlp}.fc2"))
            sums["hidden"] = RunningMoments(fc2.in_features, home)
            handles.append(fc2.register_forward_pre_hook(_input_rows(sums["hidden"])))
        if "qk" in groups and "qk" not in block.refusals:
            sums["logits"] = _RunningLogits(block, home)
            qkv = model.get_submodule(f"{block.attn}.qkv")
            handles.append(qkv.register_forward_hook(_output(sums["logits"])))
        if groups & {"vo", "heads"} and not {"vo", "heads"} <= block.refusals.keys():
            proj = cast(nn.Linear, model.get_submodule(f"{block.attn}.proj"))
            sums["head_output"] = RunningMoments(proj.in_features, home)
            handles.append(proj.register_forward_pre_hook(_input_rows(sums["head_output"])))
        running.append(sums)
    try:
        for images in batches:
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    statistics = tuple(BlockStatistics(**{name: total.result() for name, total in sums.items()}) for sums in running)
    for block, found in zip(blocks, statistics, strict=True):
        _require_finite(block, found)
    return statistics


def _require_finite(block: Block, statistics: BlockStatistics) -> None:
    moments = [m for m in (statistics.hidden, statistics.head_output) if m is not None]
    tensors = [m.covariance for m in moments]
    if statistics.logits is not None:
        tensors += [statistics.logits.gram_q, statistics.logits.gram_k]
    if not all(bool(t.isfinite().all()) for t in tensors):
        raise CorpError(
            f"Activations of {block.name} are NaN or infinite on the calibration images; "
            "check the weights and the preprocessing of the images."
        )
