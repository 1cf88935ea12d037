"""Stage 2, rank: a score for every unit, higher = keep (paper Alg. 2 and 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch import Tensor, nn

from corp_cli.config.prune import RankerConfig
from corp_cli.linalg.masks import input_gram, representatives
from corp_cli.linalg.moments import Moments, diagonal_blocks
from corp_cli.linalg.obs import Removal, removal_orders
from corp_cli.method.calibrate import accumulation_device
from corp_cli.method.statistics import BlockStatistics, Statistics
from corp_cli.models.adapter import block_weights
from corp_cli.models.blocks import GROUPS, AttentionWeights, Block, BlockWeights, MlpWeights, Sizes
from corp_cli.models.offload import kept_in, visit
from corp_cli.runtime import console, ranks

TOGETHER = 8  # blocks whose channels a GPU orders at once: as long as one takes, and a few hundred MB for each
CONSTANT = 1e-6  # of the mean: deviations below it are the rounding of float32


@dataclass(frozen=True)
class Scores:
    """Per block, higher = keep: mlp [d], qk [H, dq], vo [H, dv], heads [H]; None where the group is not pruned.

    tokens [N]: of the patches behind it, by their place, where a search by scores may merge them.
    lost [d + 1]: what the MLP loses at every number of channels by OBS, which has found it by the way.
    """

    mlp: Tensor | None = None
    qk: Tensor | None = None
    vo: Tensor | None = None
    heads: Tensor | None = None
    tokens: Tensor | None = None
    lost: Tensor | None = None


@dataclass(frozen=True)
class RankerArgs:
    """What rankers may need besides weights and statistics."""

    generator: torch.Generator
    ridge_lambda: float
    trajectory: tuple[Scores, ...] = ()  # of every block, for the ranker optin: see method.optin
    block: int = 0  # the index of the one that is ranked
    kept: Sizes | None = None  # of the block, where they are known already: what is ranked above them may tie
    removal: Removal | None = None  # of its MLP by OBS, where that was worked out together with others

    @staticmethod
    def seeded(seed: int, ridge_lambda: float, trajectory: tuple[Scores, ...] = ()) -> RankerArgs:
        """Those of a run, whose random scores follow from `seed`."""
        return RankerArgs(torch.Generator().manual_seed(seed), ridge_lambda, trajectory)


# --- rankers: (weights, statistics, args) → score ----------------------------------------------------------


def mlp_activation(weights: MlpWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """r_j = E[x_j²] of hidden channel j (Alg. 2)."""
    assert statistics.hidden is not None
    return statistics.hidden.second_moment()


def mlp_variance(weights: MlpWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """var(x_j) ‖fc2_:j‖²: the output energy of channel j beyond its mean, which the bias can carry."""
    assert statistics.hidden is not None
    return statistics.hidden.covariance.diagonal() * weights.fc2.square().sum(0)


def mlp_obs(weights: MlpWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """The place of channel j in the greedy order in which OBS removes them; those that it does not come to tie."""
    assert statistics.hidden is not None
    removal = args.removal or removals([(weights, statistics, args)])[0]
    place = torch.full_like(weights.fc2[0], weights.fc2.shape[1])
    place[removal.order] = torch.arange(len(removal.order)).to(place)
    return place


def removals(mlps: Sequence[tuple[MlpWeights, BlockStatistics, RankerArgs]]) -> list[Removal]:
    """The greedy removals of several MLPs, as many of each as its arguments have use for."""
    layers = [(weights.fc2, found.hidden) for weights, found, _ in mlps if found.hidden]
    counts = [weights.fc2.shape[1] - (args.kept.mlp if args.kept else 0) for weights, _, args in mlps]
    return removal_orders(layers, mlps[0][2].ridge_lambda, counts) if mlps else []


def mlp_magnitude(weights: MlpWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """‖fc1_j‖ ‖fc2_:j‖ (with a gate, the norms of both rows)."""
    score = weights.fc2.norm(dim=0)
    for fc1 in weights.fc1:
        score = score * fc1.norm(dim=1)
    return score


def mlp_kcm(weights: MlpWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """c_j E[x_j²]^½: how much fc2_:j stands for itself among the columns of fc2, times how strongly channel j acts.

    R2D2 of KCM (Nova et al., "Gradient-free structured pruning with unlabeled data", arXiv 2303.04185, Alg. 1 and 2):
    representative ranking by a kernel convex factorisation, and data-dependent ranking, each over its largest value.
    Simplified: the width of the kernel follows the layer (see `representatives`), and activity is the root mean square,
    which does not cancel where GELU is negative. The paper's budget of filters over all layers and its mask tuning are
    `sparsity.search=scores` and `compensation=scale`.
    """
    assert statistics.hidden is not None
    stands, acts = representatives(weights.fc2.T), statistics.hidden.second_moment().sqrt()
    return stands / stands.max() * acts / acts.max()


def mlp_output(weights: MlpWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """E[x_j²] ‖fc2_:j‖²: what channel j adds to the output; see `heads_output`."""
    return mlp_activation(weights, statistics, args) * weights.fc2.square().sum(0)


def mlp_trajectory(weights: MlpWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """The trajectory score of OPTIN, measured before: see method.optin."""
    score = args.trajectory[args.block].mlp
    assert score is not None
    return score


def qk_activation(weights: AttentionWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """s_j = E[‖q_j‖² ‖k_j‖²], norms over the tokens of one image (Eq. 12, Alg. 4)."""
    assert statistics.logits is not None
    return statistics.logits.energy


def qk_magnitude(weights: AttentionWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """‖w_Q,j‖² ‖w_K,j‖² (App. C, Eq. 36)."""
    return weights.q.square().sum(-1) * weights.k.square().sum(-1)


def vo_activation(weights: AttentionWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """E[o_j²] of every dimension of every head's output: Alg. 2 applied to the input of proj."""
    assert statistics.head_output is not None
    return statistics.head_output.second_moment().reshape(weights.v.shape[:2])


def vo_magnitude(weights: AttentionWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """‖w_V,j‖ ‖proj_:j‖."""
    return weights.v.norm(dim=-1) * weights.proj.norm(dim=0)


def heads_activation(weights: AttentionWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """E‖o_h‖² of head h's output: Alg. 2 summed over the dimensions of a head."""
    return vo_activation(weights, statistics, args).sum(-1)


def heads_magnitude(weights: AttentionWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """‖W_V,h‖_F ‖proj_h‖_F."""
    return weights.v.flatten(1).norm(dim=1) * weights.proj.transpose(0, 1).flatten(1).norm(dim=1)


def heads_output(weights: AttentionWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """E‖W_O,h o_h‖²: what head h adds to the output of attention.

    Half the second derivative of the layer's squared error by the head's mask. Kwon et al. (arXiv 2204.09656, section
    4.1) take that of the labelled loss, by its gradients: the diagonal Fisher information. This needs neither.
    """
    assert statistics.head_output is not None
    gram = input_gram(weights.proj.flatten(1), statistics.head_output)
    return diagonal_blocks(gram, weights.v.shape[1]).sum((1, 2))


def heads_trajectory(weights: AttentionWeights, statistics: BlockStatistics, args: RankerArgs) -> Tensor:
    """The trajectory score of OPTIN, measured before: see method.optin."""
    score = args.trajectory[args.block].heads
    assert score is not None
    return score


def random(units: torch.Size, args: RankerArgs) -> Tensor:
    """Uniform in [0, 1), for units of this shape."""
    return torch.rand(units, generator=args.generator, dtype=torch.float64)


RANKERS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "mlp": {
        "activation": mlp_activation,
        "magnitude": mlp_magnitude,
        "random": lambda weights, statistics, args: random(weights.fc2.shape[1:], args),
        "variance": mlp_variance,
        "obs": mlp_obs,
        "kcm": mlp_kcm,
        "output": mlp_output,
        "optin": mlp_trajectory,
    },
    "qk": {
        "activation": qk_activation,
        "magnitude": qk_magnitude,
        "random": lambda weights, statistics, args: random(weights.q.shape[:2], args),
    },
    "vo": {
        "activation": vo_activation,
        "magnitude": vo_magnitude,
        "random": lambda weights, statistics, args: random(weights.v.shape[:2], args),
    },
    "heads": {
        "activation": heads_activation,
        "magnitude": heads_magnitude,
        "random": lambda weights, statistics, args: random(weights.v.shape[:1], args),
        "output": heads_output,
        "optin": heads_trajectory,
    },
}


def rank_block(
    weights: BlockWeights,
    statistics: BlockStatistics,
    block: Block,
    groups: frozenset[str],
    cfg: RankerConfig,
    args: RankerArgs,
) -> Scores:
    """Scores of one block, for the groups that will be pruned and that the block allows."""
    found = {}
    for group in GROUPS:
        part = weights.mlp if group == "mlp" else weights.attn
        if group in groups and group not in block.refusals and part is not None:
            score = RANKERS[group][getattr(cfg, group)](part, statistics, args)
            moments = {"mlp": statistics.hidden, "vo": statistics.head_output}.get(group)
            found[group] = score if moments is None else constant_first(score, moments)
    tokens = args.trajectory[args.block].tokens if args.trajectory else None
    whole = args.removal is not None and len(args.removal.order) == block.sizes.mlp
    return Scores(**found, tokens=tokens, lost=args.removal.by_size() if args.removal and whole else None)


def rank_blocks(
    some: Sequence[tuple[BlockWeights, BlockStatistics, Block, RankerArgs]], groups: frozenset[str], cfg: RankerConfig
) -> list[Scores]:
    """`rank_block` of several, whose MLPs OBS works on at once."""
    mlps = {i: (own.mlp, found, args) for i, (own, found, _, args) in enumerate(some) if own.mlp}
    by_obs = [i for i in mlps if cfg.mlp == "obs" and "mlp" in groups - some[i][2].refusals.keys()]
    found_of = dict(zip(by_obs, removals([mlps[i] for i in by_obs]), strict=True))
    return [
        rank_block(own, found, block, groups, cfg, replace(args, removal=found_of.get(i)))
        for i, (own, found, block, args) in enumerate(some)
    ]


def constant_first(score: Tensor, moments: Moments) -> Tensor:
    """`score`, which is never negative, with -1 for channels that vary by rounding alone: the bias takes their mean."""
    constant = moments.covariance.diagonal() <= (CONSTANT * moments.mean).square()
    return score.masked_fill(constant.view_as(score).to(score.device), -1.0)


def rank(
    model: nn.Module,
    blocks: tuple[Block, ...],
    statistics: Statistics,
    groups: frozenset[str],
    cfg: RankerConfig,
    args: RankerArgs,
    sizes: tuple[Sizes, ...] | None = None,
) -> tuple[Scores, ...]:
    """Scores of every block; sizes: those that will be kept, where that does not depend on the scores."""
    home, depth = accumulation_device(next(model.parameters()).device), len(blocks)
    alone = home.type != "cuda" or kept_in(model)
    together = 1 if alone else min(TOGETHER, -(-depth // ranks.count()))

    def score(each: tuple[tuple[int, Block, BlockStatistics, Sizes | None], ...]) -> list[Scores]:
        some = [
            (block_weights(model, block), found.to(home), block, replace(args, block=i, kept=kept))
            for i, block, found, kept in each
        ]
        return rank_blocks(some, groups, cfg)

    every = zip(range(depth), visit(blocks, model), statistics, sizes or [None] * depth, strict=True)
    parts = iter(lambda: tuple(islice(every, together)), ())
    if "random" in vars(cfg).values():  # one row of numbers goes through all blocks
        return ranks.once(lambda: tuple(console.track(chain.from_iterable(map(score, parts)), "rank", depth)))
    return tuple(console.track(chain.from_iterable(ranks.spread(score, parts)), "rank", depth))
