"""Stage 1, calibrate: one streaming pass of the dense model over unlabelled images (paper Alg. 1, line 1).

The paper caches activations; here their moments are summed up as they appear, for all blocks in one pass, so memory
does not depend on the number of images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.errors import CorpError
from corp_cli.linalg.logits import logit_weights
from corp_cli.linalg.merging import size_bias
from corp_cli.linalg.moments import RunningMoments
from corp_cli.method.statistics import BlockStatistics, LogitStatistics, Statistics
from corp_cli.method.stream import Rollout
from corp_cli.models.attention.maps import MAPS
from corp_cli.models.blocks import Block
from corp_cli.models.kinds import watch_rows
from corp_cli.models.offload import HOST, kept_in, visit
from corp_cli.models.streams import through, tokens
from corp_cli.runtime import console, ranks
from corp_cli.runtime.scratch import Keep, on_host


class RunningLogits:
    """Sums behind LogitStatistics, in float64."""

    def __init__(self, block: Block, device: torch.device, weighs: bool = False) -> None:
        """weighs: whether logits are weighted too, by what attention makes of them; none to which anything is added."""
        self.block, self.weighs = block, weighs and block.bare_logits
        heads, d = block.sizes.heads, block.sizes.qk
        self.tokens, self.images = 0.0, 0
        self.queries: Tensor | float = 0.0
        self.gram_q, self.gram_k, self.gram_k_centred, self.seen_q, self.seen_k = (
            torch.zeros(heads, d, d, dtype=torch.float64, device=device) for _ in range(5)
        )
        self.energy = torch.zeros(heads, d, dtype=torch.float64, device=device)

    def add(self, qkv: Tensor, weights: Tensor | None = None, sizes: Tensor | None = None) -> None:
        """Take in rows [B, N, ...] of queries, keys and values; each query counted `weights` [B, N] times (else once).

        sizes [B, N, 1]: how many tokens each stands for, where some were merged.
        One Gram matrix per image and head gives all sums: its diagonal holds ‖q_j‖². A CPU takes heads one by one, as
        views, because batching them would copy qkv; a GPU takes all, because it would wait for Python.
        """
        d, heads, n = self.block.sizes.qk, self.block.sizes.heads, qkv.shape[1]
        sums = qkv[..., heads * d : 2 * heads * d].sum(1).double().unflatten(-1, (heads, d))  # of every image's keys
        together = heads if qkv.is_cuda else 1

        def of_heads(start: int, width: int) -> Tensor:
            """Columns of heads that go together, [B, heads, N, width]; of one head, as they lie in qkv."""
            part = qkv[..., start : start + together * width].unflatten(-1, (-1, width)).transpose(1, 2)
            return part.contiguous() if qkv.is_cuda else part  # where each product would copy them anew

        for head in range(0, heads, together):
            some = slice(head, head + together)
            q, k = of_heads(head * d, d), of_heads((heads + head) * d, d)
            gram_q, gram_k = q.mT @ q, k.mT @ k  # [B, heads, d, d]
            norms_q, norms_k = (gram.diagonal(dim1=2, dim2=3) for gram in (gram_q, gram_k))
            self.energy[some] += (norms_q.double() * norms_k).sum(0).to(self.energy)
            if weights is not None:
                gram_q = (q * weights[:, None, :, None]).mT @ q
            sum_k, means = gram_k.sum(0).double(), sums[:, some].transpose(0, 1)
            self.gram_q[some] += gram_q.sum(0).to(self.gram_q)
            self.gram_k[some] += sum_k.to(self.gram_k)
            self.gram_k_centred[some] += (sum_k - means.mT @ means / n).to(self.gram_k)
            if self.weighs:
                width = self.block.sizes.vo
                self._weigh(some, q, k, of_heads(2 * heads * d + head * width, width), weights, sizes)
        self.images += qkv.shape[0]
        self.tokens += qkv.shape[0] * n
        self.queries = self.queries + (qkv.shape[0] * n if weights is None else weights.sum().to(self.energy))

    def _weigh(
        self, some: slice, q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, sizes: Tensor | None
    ) -> None:
        """Take in q, k [B, heads, N, d] and v [B, heads, N, dv] of `some` heads, as many images at a time as fit."""
        counted = q.new_ones(len(q), 1, q.shape[2]) if weights is None else weights[:, None].to(q)
        step = max(1, MAPS // (q.shape[1] * q.shape[2] ** 2))
        for start in range(0, len(q), step):
            at = slice(start, start + step)
            bias = None if sizes is None else size_bias(sizes[at])
            r, c = logit_weights(q[at], k[at], v[at], self.block.scale, counted[at], bias)
            centred = k[at] - (c[..., None, :] @ k[at]) / c.sum(-1)[..., None, None]
            self.seen_q[some] += ((q[at] * r[..., None]).mT @ q[at]).sum(0).to(self.seen_q)
            self.seen_k[some] += ((centred * c[..., None]).mT @ centred).sum(0).to(self.seen_k)

    def result(self) -> LogitStatistics:
        """The statistics of everything that all processes have taken in."""
        counts = torch.tensor([float(self.queries), self.tokens, self.images], dtype=torch.float64)
        queries, tokens, images = ranks.total(counts).tolist()
        return LogitStatistics(
            ranks.total(self.gram_q) / queries,
            ranks.total(self.gram_k) / tokens,
            ranks.total(self.gram_k_centred) / tokens,
            ranks.total(self.energy) / images,
            *((ranks.total(self.seen_q) / queries, ranks.total(self.seen_k) / tokens) if self.weighs else ()),
        )


def statistics_device(model: nn.Module) -> torch.device:
    """Where statistics of all blocks are kept: with the model, or on the host where its blocks are there."""
    return HOST if kept_in(model) else accumulation_device(next(model.parameters()).device)


def pooled(own: RunningMoments) -> RunningMoments:
    """Those of all processes: w = Σ w_r, μ = Σ w_r μ_r / w, S = Σ (S_r + w_r (μ_r - μ)(μ_r - μ)ᵀ)."""
    if ranks.count() == 1:
        return own
    every = RunningMoments(len(own.mean), own.mean.device)
    sums = ranks.total(torch.cat([own.mean.new_tensor([own.count, float(own.weight)]), own.weight * own.mean]))
    every.count, every.weight = int(sums[0]), sums[1]
    if every.weight:
        every.mean = sums[2:] / every.weight
        delta = own.mean - every.mean
        every.scatter = ranks.total(own.scatter.addr(delta, delta, alpha=float(own.weight)))
    return every


def result_of(sums: RunningMoments | RunningLogits) -> Any:
    """The statistics of everything that all processes have taken in."""
    return sums.result() if isinstance(sums, RunningLogits) else pooled(sums).final()


def accumulation_device(device: torch.device) -> torch.device:
    """Where float64 sums are kept: with the model, or on the CPU where the device has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


class Calibration:
    """Running statistics of every block, for the groups that will be pruned. Hooks are in place only during `add`."""

    def __init__(
        self, model: nn.Module, blocks: tuple[Block, ...], groups: frozenset[str], weighs: bool = False
    ) -> None:
        self.model, self.blocks = model, blocks
        home = accumulation_device(next(model.parameters()).device)
        self.sums: list[dict[str, Any]] = [_empty_sums(block, groups, home, weighs) for block in blocks]

    @torch.inference_mode()
    def add(self, images: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Run the dense model on images [B, C, H, W], or `forward` on what that takes; take in what blocks compute."""
        handles = []
        for block, sums in zip(self.blocks, self.sums, strict=True):
            for name, path in (("hidden", f"{block.mlp}.fc2"), ("head_output", f"{block.attn}.proj")):
                if name in sums:
                    linear = self.model.get_submodule(path)
                    handles.append(linear.register_forward_pre_hook(_take_input(sums[name])))
            if "logits" in sums:
                handles.append(watch_rows(self.model.get_submodule(block.attn), sums["logits"].add))
        try:
            return (forward or self.model)(images)
        finally:
            for handle in handles:
                handle.remove()

    def result(self) -> Statistics:
        """The statistics of all images. Raises CorpError when they are not finite, naming the block."""
        statistics = tuple(
            BlockStatistics(**{name: result_of(total) for name, total in sums.items()}) for sums in self.sums
        )
        for block, found in zip(self.blocks, statistics, strict=True):
            require_finite(block, found)
        return statistics


def _empty_sums(block: Block, groups: frozenset[str], device: torch.device, weighs: bool) -> dict[str, Any]:
    """What is to be measured of a block: fields of BlockStatistics by name."""
    sums: dict[str, Any] = {}
    allowed = groups - block.refusals.keys()
    if "mlp" in allowed:
        sums["hidden"] = RunningMoments(block.sizes.mlp, device)
    if "qk" in allowed:
        sums["logits"] = RunningLogits(block, device, weighs)
    if allowed & {"vo", "heads"}:
        sums["head_output"] = RunningMoments(block.sizes.heads * block.sizes.vo, device)
    return sums


def _take_input(running: RunningMoments) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        running.add(args[0].flatten(0, -2))

    return hook


def calibrate(
    model: nn.Module,
    blocks: tuple[Block, ...],
    batches: Iterable[Tensor],
    groups: frozenset[str],
    keep: Keep = on_host,
    weighs: bool = False,
    rollout: Rollout | None = None,
) -> Statistics:
    """Statistics of every block over all images of `batches` [B, C, H, W], for the groups that will be pruned.

    weighs: see RunningLogits. Where blocks stay on the host, all images go through one before the next, and wait where
    `keep` puts them. rollout: takes in, by the way, how much is read of every token.
    """
    if kept_in(model):
        return calibrate_by_block(model, blocks, batches, groups, keep, weighs)
    calibration = Calibration(model, blocks, groups, weighs)
    if rollout:
        rollout.batches.clear()
    for images in batches:
        with rollout.watching(model, blocks) if rollout else nullcontext():
            calibration.add(images)
    return calibration.result()


@torch.inference_mode()
def calibrate_by_block(
    model: nn.Module,
    blocks: tuple[Block, ...],
    batches: Iterable[Tensor],
    groups: frozenset[str],
    keep: Keep,
    weighs: bool,
) -> Statistics:
    """The same with one block, its statistics and one batch on the device at a time."""
    stream, found = [keep(tokens(model, images)) for images in batches], []
    device, home = next(model.parameters()).device, statistics_device(model)
    for block in console.track(visit(blocks, model), "measure", len(blocks)):
        calibration = Calibration(model, (block,), groups, weighs)
        for i, x in enumerate(stream):
            stream[i] = keep(calibration.add(x.to(device), partial(through, model, block)))
        found.append(calibration.result()[0].to(home))
    return tuple(found)


def require_finite(block: Block, statistics: BlockStatistics) -> None:
    """Raise CorpError where what was measured of `block` is not finite."""
    moments = [m for m in (statistics.hidden, statistics.head_output) if m is not None]
    tensors = [m.covariance for m in moments]
    if statistics.logits is not None:
        logits = statistics.logits
        seen = (logits.seen_q, logits.seen_k)
        tensors += [logits.gram_q, logits.gram_k, *(t for t in seen if t is not None)]
    if not all(bool(t.isfinite().all()) for t in tensors):
        raise CorpError(
            f"Activations of {block.name} are NaN or infinite on the calibration images; "
            "check the weights and the preprocessing of the images."
        )


def require_tokens(
    blocks: tuple[Block, ...], statistics: Statistics, images: int, compensation: CompensationConfig
) -> None:
    """Say how many images are needed where there are fewer tokens than channels: the covariance is then singular.

    A ridge copes, at a loss; raises CorpError where an affine repair is asked for without one.
    """
    for block, found in zip(blocks, statistics, strict=True):
        for group, moments in (("mlp", found.hidden), ("vo", found.head_output)):
            if moments and lacks_tokens(block, group, moments.count, images, compensation):
                return


def lacks_tokens(block: Block, group: str, tokens: int, images: int, compensation: CompensationConfig) -> bool:
    """Whether `tokens` are fewer than the channels of a group, and said so; raises CorpError as `require_tokens`."""
    channels = block.sizes.mlp if group == "mlp" else block.sizes.heads * block.sizes.vo
    if tokens >= channels or getattr(compensation, group) not in ("affine", "gauss_newton"):
        return False
    needed = math.ceil(channels * images / tokens)
    said = (
        f"{images} calibration images give {tokens} tokens for the {channels} channels of {group} in "
        f"{block.name}; at least {needed} images are needed, and many more are better"
    )
    if compensation.ridge == 0:
        raise CorpError(f"{said}. Give more images, or set compensation.ridge_lambda above 0.")
    more = 10 * compensation.ridge
    advice = f" With so few a larger compensation.ridge_lambda may help, such as {more:g}."
    console.warn(f"{said}.{'' if compensation.ridge_lambda is None else advice}")
    return True
