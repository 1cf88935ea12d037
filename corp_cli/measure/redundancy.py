"""What `corp analyze` finds of a block, as in analysis.json; docs/report.md explains it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Redundancy:
    """Of the channels of one layer; of queries, keys and values: of the dimensions of a head, means over heads."""

    channels: int
    effective_rank: float  # participation ratio (Σ λ)² / Σ λ² of the eigenvalues of the covariance
    rank_ratio: float  # over channels
    entropy_rank: float  # exp(-Σ p ln p), p = λ / Σ λ
    k95: float  # principal components that hold 95% of the variance
    k95_ratio: float
    sparsity: float  # share of activations whose absolute value is below the threshold
    near_duplicates: float  # share of channels whose largest absolute correlation with another exceeds 0.95
    largest_correlation: float  # mean over channels of the largest absolute correlation with another


@dataclass(frozen=True)
class AttentionEntropy:
    """-Σ a ln a of attention maps, mean over images, heads and queries."""

    nats: float
    relative: float  # over the log of the number of tokens, which uniform attention has


@dataclass(frozen=True)
class RankingAgreement:
    """Of activation and magnitude ranking of queries and keys within a head (appendix C), means over heads."""

    overlap: float  # share of one kept half that is in the other; 0.5 by chance
    spearman: float


@dataclass(frozen=True)
class BlockAnalysis:
    """One block; None is explained in `left_out`, by field."""

    name: str
    mlp: Redundancy | None  # behind the activation, what fc2 reads
    q: Redundancy | None
    k: Redundancy | None
    v: Redundancy | None
    attention_entropy: AttentionEntropy | None
    qk_ranking: RankingAgreement | None
    left_out: dict[str, str]
