"""How redundant the blocks of a dense model are: the paper's Table 4, and the same of its attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corp_cli.config.prune import RankerConfig
from corp_cli.linalg.agreement import overlap, spearman
from corp_cli.linalg.moments import RunningMoments, diagonal_blocks
from corp_cli.linalg.spectrum import (
    attention_entropy,
    components_for,
    effective_rank,
    entropy_rank,
    largest_correlations,
    spectrum,
)
from corp_cli.measure.redundancy import AttentionEntropy, BlockAnalysis, RankingAgreement, Redundancy
from corp_cli.method.calibrate import accumulation_device
from corp_cli.method.keep import top
from corp_cli.method.rank import RankerArgs, rank
from corp_cli.method.statistics import BlockStatistics, Statistics
from corp_cli.models.attention.maps import AttentionMaps
from corp_cli.models.blocks import Block
from corp_cli.models.kinds import watch_rows
from corp_cli.runtime import console

SHARE = 0.95  # of the variance that k95 components hold
DUPLICATE = 0.95  # correlation above which two channels are nearly the same
PROJECTIONS = ("q", "k", "v")
PARTS = ("mlp", *PROJECTIONS, "attention_entropy", "qk_ranking")  # of a BlockAnalysis
UNSEEN = "it is computed where corp does not see it"


class NearZero:
    """The share of values below a threshold, of a stream."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.count = threshold, 0
        self.found: Tensor | int = 0

    def add(self, x: Tensor) -> None:
        """Take in all values of x."""
        self.found = self.found + (x.abs() < self.threshold).sum()
        self.count += x.numel()

    def share(self) -> float:
        """Of everything taken in."""
        return float(self.found) / self.count


class BlockSums:
    """What is summed up of one block besides its statistics."""

    def __init__(self, block: Block, threshold: float, device: torch.device) -> None:
        self.block, sizes = block, block.sizes
        self.widths = dict(zip(PROJECTIONS, (sizes.qk, sizes.qk, sizes.vo), strict=True))
        self.moments = {name: RunningMoments(sizes.heads * width, device) for name, width in self.widths.items()}
        self.near_zero = {name: NearZero(threshold) for name in ("mlp", *PROJECTIONS)}
        self.maps, self.within = AttentionMaps(entropy_sums), ExitStack()
        self.entropy = torch.zeros(3, dtype=torch.float64, device=device)

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """From now on take in what the block computes, as far as corp reads it."""
        block, handles = self.block, []
        if block.sizes.mlp:
            handles.append(model.get_submodule(f"{block.mlp}.fc2").register_forward_pre_hook(self.add_hidden))
        if block.sizes.heads:
            attn = model.get_submodule(block.attn)
            handles.append(watch_rows(attn, self.add_rows))
            handles.append(attn.register_forward_pre_hook(self.enter))
            handles.append(attn.register_forward_hook(self.leave, always_call=True))
        return handles

    def add_hidden(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Take in the input of fc2."""
        self.near_zero["mlp"].add(args[0])

    def add_rows(self, rows: Tensor) -> None:
        """Take in queries, keys and values [B, N, rows], before any norm or rotation."""
        widths = [self.block.sizes.heads * width for width in self.widths.values()]
        for name, x in zip(PROJECTIONS, rows.flatten(0, -2).split(widths, -1), strict=True):
            self.moments[name].add(x)
            self.near_zero[name].add(x)

    def enter(self, *_: object) -> None:
        """The attention begins."""
        self.maps.found.clear()
        self.within.enter_context(self.maps)

    def leave(self, *_: object) -> None:
        """The attention is done: take in its maps."""
        self.within.close()
        if len(self.maps.found) == 1:
            self.entropy += self.maps.found[0].to(self.entropy)


def entropy_sums(maps: Tensor) -> Tensor:
    """[..., N, N] → sums over queries, [3]: of their entropy in nats, of that over log N, and how many there are."""
    nats = attention_entropy(maps)
    return torch.stack([nats.sum(), nats.sum() / math.log(max(2, maps.shape[-1])), nats.new_tensor(nats.numel())])


def observe(
    model: nn.Module, blocks: tuple[Block, ...], batches: Iterable[Tensor], threshold: float
) -> list[BlockSums]:
    """One pass of the dense model over all images of `batches` [B, C, H, W]: what statistics do not hold."""
    device = accumulation_device(next(model.parameters()).device)
    every = [BlockSums(block, threshold, device) for block in blocks]
    handles = [handle for sums in every for handle in sums.watch(model)]
    try:
        with torch.inference_mode():
            for images in batches:
                model(images)
    finally:
        for handle in handles:
            handle.remove()
    return every


def redundancy(covariances: Tensor, near_zero: float) -> Redundancy:
    """Of covariances [H, d, d], one of every head (or one of all), means over them."""
    values = spectrum(covariances)
    d, rank, k95 = values.shape[-1], effective_rank(values), components_for(values, SHARE).double()
    largest = largest_correlations(covariances)
    return Redundancy(
        channels=d,
        effective_rank=float(rank.mean()),
        rank_ratio=float(rank.mean() / d),
        entropy_rank=float(entropy_rank(values).mean()),
        k95=float(k95.mean()),
        k95_ratio=float(k95.mean() / d),
        sparsity=near_zero,
        near_duplicates=float((largest > DUPLICATE).double().mean()),
        largest_correlation=float(largest.mean()),
    )


def agreement(activation: Tensor, magnitude: Tensor) -> RankingAgreement:
    """Of two scores [H, d] of the dimensions of every head: of the halves that they keep, and of all ranks."""
    half = max(1, activation.shape[-1] // 2)
    kept = overlap(top(activation, half), top(magnitude, half))
    return RankingAgreement(float(kept.mean()), float(spearman(activation, magnitude).mean()))


def analyze(
    model: nn.Module,
    blocks: tuple[Block, ...],
    statistics: Statistics,
    batches: Iterable[Tensor],
    threshold: float,
) -> list[BlockAnalysis]:
    """What is redundant in every block (paper section 3.1, Table 4 and appendix C).

    statistics: of the groups mlp and qk, on the same images as `batches` [B, C, H, W]. threshold: activations below it
    count as zero.
    """
    args, groups = RankerArgs.seeded(0, 0.0), frozenset({"qk"})
    by = [rank(model, blocks, statistics, groups, RankerConfig(qk=name), args) for name in ("activation", "magnitude")]
    every = observe(model, blocks, batches, threshold)
    rows = zip(every, statistics, *by, strict=True)
    return [
        analysis_of(sums, found, None if a.qk is None or m.qk is None else agreement(a.qk, m.qk))
        for sums, found, a, m in console.track(rows, "analyze", len(blocks))
    ]


def analysis_of(sums: BlockSums, statistics: BlockStatistics, ranking: RankingAgreement | None) -> BlockAnalysis:
    """What was found of one block."""
    block, near_zero, parts = sums.block, sums.near_zero, dict[str, Any]()
    if statistics.hidden is not None:
        parts["mlp"] = redundancy(statistics.hidden.covariance[None], near_zero["mlp"].share())
    for name, moments in sums.moments.items() if block.sizes.heads else ():
        by_head = diagonal_blocks(moments.result().covariance, sums.widths[name])
        parts[name] = redundancy(by_head, near_zero[name].share())
    nats, relative, queries = sums.entropy.tolist()
    if queries:
        parts["attention_entropy"] = AttentionEntropy(nats / queries, relative / queries)
    if ranking is not None:
        parts["qk_ranking"] = ranking
    why = {**dict.fromkeys(PARTS, block.refusals.get("qk", UNSEEN)), "mlp": block.refusals.get("mlp", UNSEEN)}
    if block.sizes.heads:
        why["attention_entropy"] = UNSEEN
    left_out = {name: why[name] for name in PARTS if name not in parts}
    return BlockAnalysis(block.name, **{name: parts.get(name) for name in PARTS}, left_out=left_out)
