"""Stage 2, rank: a score for every unit (higher = keep), and which units stay at given sizes (paper Alg. 2 and 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from corp_cli.config.prune import RankerConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.linalg.obs import removal_order
from corp_cli.method.statistics import BlockStatistics, Statistics
from corp_cli.models.adapter import block_weights
from corp_cli.models.blocks import GROUPS, AttentionWeights, Block, BlockWeights, MlpWeights, Sizes
from corp_cli.runtime import console


@dataclass(frozen=True)
class Scores:
    """Per block, higher = keep: mlp [d], qk [H, dq], vo [H, dv], heads [H]; None where the group is not pruned."""

    mlp: Tensor | None = None
    qk: Tensor | None = None
    vo: Tensor | None = None
    heads: Tensor | None = None


@dataclass(frozen=True)
class KeptAttention:
    """The sorted indices that stay in an attention: heads [h], and qk [h, k], vo [h, v] within the kept heads."""

    heads: Tensor
    qk: Tensor
    vo: Tensor


@dataclass(frozen=True)
class Kept:
    """What stays of a block: sorted hidden channels mlp [m], and its attention; None where nothing is pruned."""

    mlp: Tensor | None = None
    attn: KeptAttention | None = None


Plan = tuple[Kept, ...]  # one per block, first to last


@dataclass(frozen=True)
class Context:
    """What rankers may need besides weights and statistics."""

    generator: torch.Generator
    ridge_lambda: float

    @staticmethod
    def seeded(seed: int, ridge_lambda: float) -> Context:
        """A context whose random scores follow from `seed`."""
        return Context(torch.Generator().manual_seed(seed), ridge_lambda)


# --- rankers: (weights, statistics, context) → score ----------------------------------------------------------


def mlp_activation(weights: MlpWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """r_j = E[x_j²] of hidden channel j (Alg. 2)."""
    assert statistics.hidden is not None
    return statistics.hidden.second_moment()


def mlp_variance(weights: MlpWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """var(x_j) ‖fc2_:j‖²: the output energy of channel j beyond its mean, which the bias can carry."""
    assert statistics.hidden is not None
    return statistics.hidden.covariance.diagonal() * weights.fc2.square().sum(0)


def mlp_obs(weights: MlpWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """Output error once channel j is removed, in the greedy order of OBS: what is removed last scores highest."""
    assert statistics.hidden is not None
    removal = removal_order(weights.fc2, statistics.hidden, context.ridge_lambda)
    position = torch.empty_like(removal.error)
    position[removal.order] = torch.arange(len(removal.order)).to(position)
    return position


def mlp_magnitude(weights: MlpWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """‖fc1_j‖ ‖fc2_:j‖ (with a gate, the norms of both rows)."""
    score = weights.fc2.norm(dim=0)
    for fc1 in weights.fc1:
        score = score * fc1.norm(dim=1)
    return score


def mlp_random(weights: MlpWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """Uniform in [0, 1)."""
    return torch.rand(weights.fc2.shape[1], generator=context.generator, dtype=torch.float64)


def qk_activation(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """s_j = E[‖q_j‖² ‖k_j‖²], norms over the tokens of one image (Eq. 12, Alg. 4)."""
    assert statistics.logits is not None
    return statistics.logits.energy


def qk_magnitude(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """‖w_Q,j‖² ‖w_K,j‖² (App. C, Eq. 36)."""
    return weights.q.square().sum(-1) * weights.k.square().sum(-1)


def qk_random(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """Uniform in [0, 1)."""
    return torch.rand(weights.q.shape[:2], generator=context.generator, dtype=torch.float64)


def vo_activation(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """E[o_j²] of every dimension of every head's output: Alg. 2 applied to the input of proj."""
    assert statistics.head_output is not None
    return statistics.head_output.second_moment().reshape(weights.v.shape[:2])


def vo_magnitude(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """‖w_V,j‖ ‖proj_:j‖."""
    return weights.v.norm(dim=-1) * weights.proj.norm(dim=0)


def vo_random(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """Uniform in [0, 1)."""
    return torch.rand(weights.v.shape[:2], generator=context.generator, dtype=torch.float64)


def heads_activation(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """E‖o_h‖² of head h's output: Alg. 2 summed over the dimensions of a head."""
    return vo_activation(weights, statistics, context).sum(-1)


def heads_magnitude(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """‖W_V,h‖_F ‖proj_h‖_F."""
    return weights.v.flatten(1).norm(dim=1) * weights.proj.transpose(0, 1).flatten(1).norm(dim=1)


def heads_random(weights: AttentionWeights, statistics: BlockStatistics, context: Context) -> Tensor:
    """Uniform in [0, 1)."""
    return torch.rand(weights.v.shape[0], generator=context.generator, dtype=torch.float64)


RANKERS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "mlp": {
        "activation": mlp_activation,
        "magnitude": mlp_magnitude,
        "random": mlp_random,
        "variance": mlp_variance,
        "obs": mlp_obs,
    },
    "qk": {"activation": qk_activation, "magnitude": qk_magnitude, "random": qk_random},
    "vo": {"activation": vo_activation, "magnitude": vo_magnitude, "random": vo_random},
    "heads": {"activation": heads_activation, "magnitude": heads_magnitude, "random": heads_random},
}


def rank_block(
    weights: BlockWeights,
    statistics: BlockStatistics,
    block: Block,
    groups: frozenset[str],
    cfg: RankerConfig,
    context: Context,
) -> Scores:
    """Scores of one block, for the groups that will be pruned and that the block allows."""
    found = {}
    for group in GROUPS:
        part = weights.mlp if group == "mlp" else weights.attn
        if group in groups and group not in block.refusals and part is not None:
            found[group] = RANKERS[group][getattr(cfg, group)](part, statistics, context)
    return Scores(**found)


def rank(
    model: nn.Module,
    blocks: tuple[Block, ...],
    statistics: Statistics,
    groups: frozenset[str],
    cfg: RankerConfig,
    context: Context,
) -> tuple[Scores, ...]:
    """Scores of every block."""
    return tuple(
        rank_block(block_weights(model, block), found, block, groups, cfg, context)
        for block, found in console.track(zip(blocks, statistics, strict=True), "rank", len(blocks))
    )


# --- plan -----------------------------------------------------------------------------------------------------


def kept_size(dense: int, fraction: float, round_to: int) -> int:
    """Units to keep of `dense` when removing `fraction`: all of none, else the nearest multiple of `round_to`."""
    if fraction == 0:
        return dense
    size = round(dense * (1 - fraction) / round_to) * round_to
    return min(dense, max(size, min(round_to, dense)))


def top(scores: Tensor, size: int) -> Tensor:
    """Indices of the `size` largest scores of the last dimension, in ascending order; ties go to the lower index."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :size].sort(dim=-1).values


def uniform_sizes(block: Block, groups: frozenset[str], cfg: SparsityConfig) -> Sizes:
    """Sizes as asked, the same for every block; dense where the block does not allow it."""
    fractions = {g: f if g in groups and g not in block.refusals else 0.0 for g, f in cfg.fractions().items()}
    dense = block.sizes
    return Sizes(
        kept_size(dense.mlp, fractions["mlp"], cfg.round_to),
        kept_size(dense.qk, fractions["qk"], cfg.round_to),
        kept_size(dense.vo, fractions["vo"], cfg.round_to),
        kept_size(dense.heads, fractions["heads"], 1),
    )


def keep(scores: Scores, block: Block, sizes: Sizes) -> Kept:
    """The units of a block with the highest scores, as many as `sizes` says."""
    dense = block.sizes
    mlp = top(scores.mlp, sizes.mlp) if scores.mlp is not None and sizes.mlp < dense.mlp else None
    heads = torch.arange(dense.heads)
    if scores.heads is not None:
        heads = top(scores.heads, sizes.heads).cpu()
    qk = _kept_dimensions(scores.qk, heads, dense.qk, sizes.qk)
    vo = _kept_dimensions(scores.vo, heads, dense.vo, sizes.vo)
    pruned = (len(heads), qk.shape[1], vo.shape[1]) != (dense.heads, dense.qk, dense.vo)
    return Kept(mlp, KeptAttention(heads, qk, vo) if pruned else None)


def _kept_dimensions(score: Tensor | None, heads: Tensor, dense: int, size: int) -> Tensor:
    if score is None:
        return torch.arange(dense).repeat(len(heads), 1)
    return top(score[heads.to(score.device)], size)


def check_supported(blocks: tuple[Block, ...], cfg: SparsityConfig) -> tuple[frozenset[str], list[str]]:
    """The groups to prune, and what is left alone because the model does not allow it.

    Raises CorpError naming the layer and the reason, unless `sparsity.skip_unsupported` is set or a budget chooses.
    """
    groups, skipped = cfg.groups(), []
    for group in sorted(groups):
        refusals = [(b.attn if group != "mlp" else b.mlp, b.refusals[group]) for b in blocks if group in b.refusals]
        if not refusals:
            continue
        layer, reason = refusals[0]
        if not cfg.skip_unsupported and not cfg.chooses_sizes():
            raise CorpError(
                f"{layer} does not allow sparsity.{group}: {reason}. Set sparsity.{group}=0, or "
                "sparsity.skip_unsupported=true to leave such groups alone and prune the rest."
            )
        skipped.append(f"{group}: {len(refusals)} of {len(blocks)} blocks, first {layer}: {reason}")
    return groups, skipped
