"""Stage 3, one shot: values and MLPs that were cut, refitted by what the dense model is given and gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.linalg.fit import Fit
from corp_cli.method.calibrate import require_finite
from corp_cli.method.compensate import Errors, compensate
from corp_cli.method.fit_mlp import ROUNDS, fit_block
from corp_cli.method.fit_values import fit_values
from corp_cli.method.keep import KeptUnits, keep
from corp_cli.method.observe import joint_moments, observe, with_ridge
from corp_cli.method.rank import Scores
from corp_cli.method.sample import Sample, sampled
from corp_cli.method.statistics import BlockStatistics, Statistics
from corp_cli.method.stream import Stream, advance_dense, enter_block, start_streams
from corp_cli.models.adapter import attention_weights, blocks_of, mlp_weights, replace_attention, sharing
from corp_cli.models.blocks import Block
from corp_cli.models.offload import visit
from corp_cli.models.streams import sublayers
from corp_cli.runtime import console, ranks
from corp_cli.runtime.scratch import Keep, on_host

TRIAL_IMAGES, TRIAL_TOKENS = 512, 2**15  # for `left_by_refit`


def trial_depends(cfg: CompensationConfig) -> list[object]:
    """What `left_by_refit` depends on, beside the images, the model and how its MLPs are cut."""
    fitted = cfg.token_weights, cfg.class_token_weight, cfg.token_floor, cfg.fit_tokens
    return [TRIAL_IMAGES, TRIAL_TOKENS, ROUNDS[cfg.propagate], cfg.ridge_lambda, *fitted]


@torch.no_grad()
def fit_every_block(
    dense: nn.Module,
    pruned: nn.Module,
    blocks: tuple[Block, ...],
    kept: tuple[KeptUnits, ...],
    errors: Errors,
    batches: Iterable[Tensor],
    cfg: CompensationConfig,
    seed: int,
    keep_tokens: Keep = on_host,
    weights: Tensor | None = None,
) -> tuple[nn.Module, Errors]:
    """A copy of `pruned` in which all values and MLPs that were cut are refitted; `errors` with what came of it.

    weights: of tokens, where they are known; see `start_streams`.
    """
    pruned, found = sharing(pruned), [dict(error) for error in errors]
    stream = start_streams(dense, blocks, batches, cfg, seed, keep_tokens, weights)
    several, cut = stream.images > 1, blocks_of(pruned)
    for i, block in enumerate(console.track(visit(blocks, dense, pruned), "refit", len(blocks))):
        enter_block(stream, dense, block)
        attention, mlp = sublayers(dense, block)
        stream.pruned = list(stream.dense)  # x̂ = x
        attn, units = kept[i].attn, kept[i].mlp
        if attn is not None and attn.vo.shape[1] < block.sizes.vo and cfg.vo == "reduced_rank" and several:
            targets = [stream.keep(seen.target) for seen in observe(stream, attention, cfg)]
            fits = fit_attention(stream, dense, pruned, block, cut[i], attn.heads, targets, cfg, seed + i)
            found[i]["vo"] = replace(found[i]["vo"], fits=fits)
        else:
            advance_dense(stream, attention)
        stream.pruned = list(stream.dense)
        if units is not None and cfg.mlp == "gauss_newton" and several:
            fit = fit_cut_mlp(stream, dense, pruned, block, units, cfg, seed + i)
            found[i]["mlp"] = replace(found[i]["mlp"], fits=(fit,))
        else:
            advance_dense(stream, mlp)
    return pruned.eval(), tuple(found)


@torch.no_grad()
def left_by_refit(
    dense: nn.Module,
    blocks: tuple[Block, ...],
    statistics: Statistics,
    scores: tuple[Scores, ...],
    batches: Iterable[Tensor],
    cfg: CompensationConfig,
    seed: int,
    keep_tokens: Keep = on_host,
) -> tuple[float, ...]:
    """Error of every MLP at half of its channels on images kept aside, after its refit over before; 1 without one.

    By that much what the closed form loses there will shrink: the first blocks gain most of it, the last ones nothing.
    """
    half = tuple(replace(block.sizes, mlp=max(1, block.sizes.mlp // 2)) for block in blocks)
    kept = tuple(replace(keep(*each), attn=None) for each in zip(scores, blocks, half, strict=True))
    cut, errors = compensate(dense, blocks, statistics, kept, cfg)
    brief = replace(cfg, fit_tokens=min(cfg.fit_tokens, TRIAL_TOKENS), vo="affine")
    _, errors = fit_every_block(dense, cut, blocks, kept, errors, batches, brief, seed, keep_tokens)
    fits = ([fit.held_out for fit in found["mlp"].fits] if "mlp" in found else [] for found in errors)
    return tuple(next((after / before for before, after in held_out if before > 0), 1.0) for held_out in fits)


def fit_attention(
    stream: Stream,
    dense: nn.Module,
    pruned: nn.Module,
    block: Block,
    cut: Block,
    heads: Tensor,
    targets: list[Tensor],
    cfg: CompensationConfig,
    seed: int,
) -> tuple[Fit, ...]:
    """Refit the values of a `block`, which is `cut` in `pruned` and has `heads` left, and its proj."""
    attn, whole = attention_weights(pruned, cut), attention_weights(dense, block)
    heads = heads.to(whole.v.device)
    whole = replace(whole, v=whole.v[heads], proj=whole.proj[:, heads])
    fitted, fits = fit_values(stream, pruned, block, attn, whole, targets, cfg, seed)
    replace_attention(pruned, block, fitted)
    return fits


def fit_cut_mlp(
    stream: Stream, dense: nn.Module, pruned: nn.Module, block: Block, units: Tensor, cfg: CompensationConfig, seed: int
) -> Fit:
    """Refit the MLP of a block of `pruned`, of which `units` are left; meanwhile x advances past the dense one."""
    mlp, sample = sublayers(dense, block)[1], Sample(cfg.fit_tokens, seed, stream.keep)
    weights, left = mlp_weights(pruned, block), units.to(stream.device)
    every = sampled(stream, observe(stream, mlp, cfg), sample)
    seen = (replace(batch, inputs=batch.inputs[..., left]) for batch in every)
    joint = joint_moments(stream, sublayers(pruned, block)[1], seen)
    require_finite(block, BlockStatistics(hidden=joint.every))
    how, before = ranks.once(with_ridge, weights.fc2, joint, cfg), joint.every
    del joint  # there may be no room for all of it beside the tokens
    return fit_block(stream, pruned, block, weights, sample, how, before)
