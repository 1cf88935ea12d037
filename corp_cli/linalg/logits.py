"""Compensation of attention logits by a Sylvester equation (paper §3.4, App. B.2, Alg. 5), batched over heads.

And what a logit's error does to what attention gives, by which those that matter are fitted best.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from corp_cli.linalg.attention import ALIGNED, attended
from corp_cli.linalg.moments import relative

EVEN = 0.1  # share of the weight of logits that is spread evenly
DOUBT = 1e-3  # of what weights are a difference of: where they are as small, they are rounding


def sylvester(gram_q: Tensor, gram_k: Tensor, rhs: Tensor, ridge_lambda: float) -> Tensor:
    """M solving G_Q M G_K + λM = C (Eq. 15, 29); all [H, s, s], float64.

    λ = `ridge_lambda` x mean(diag G_Q) x mean(diag G_K): relative, because it stands beside products of their
    eigenvalues. G_Q = UaUᵀ and G_K = VbVᵀ turn the equation into (a_i b_j + λ) (UᵀMV)_ij = (UᵀCV)_ij. M is not
    symmetric. Directions in which nothing was seen (a_i b_j + λ = 0) are left uncorrected.
    """
    a, U = torch.linalg.eigh(gram_q)
    b, V = torch.linalg.eigh(gram_k)
    a, b = a.clamp(min=0), b.clamp(min=0)
    ridge = ridge_lambda * a.mean(-1) * b.mean(-1)
    denominator = a[:, :, None] * b[:, None, :] + ridge[:, None, None]
    cut = denominator.amax((-2, -1), keepdim=True) * a.shape[-1] ** 2 * torch.finfo(a.dtype).eps
    seen = denominator > cut
    rotated = U.mT @ rhs @ V
    return U @ torch.where(seen, rotated / denominator.where(seen, torch.ones_like(denominator)), 0.0) @ V.mT


def take(matrices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """matrices[h][rows[h]][:, columns[h]] for every head: [H, d, d], [H, r], [H, c] → [H, r, c]."""
    heads = torch.arange(len(matrices), device=matrices.device)[:, None, None]
    return matrices[heads, rows[:, :, None], columns[:, None, :]]


def missing_logits(gram_q: Tensor, gram_k: Tensor, kept: Tensor, pruned: Tensor, ridge_lambda: float) -> Tensor:
    """M with Q_P K_Pᵀ ≈ Q_S M K_Sᵀ (Eq. 13, 27, 30), from G_Q = E[qqᵀ], G_K = E[kkᵀ].

    gram_q and gram_k [H, d, d] over all calibration tokens; kept [H, s], pruned [H, p]; returns [H, s, s].
    """
    cross_q = take(gram_q, kept, pruned)  # Q_SᵀQ_P
    cross_k = take(gram_k, pruned, kept)  # K_PᵀK_S
    return sylvester(take(gram_q, kept, kept), take(gram_k, kept, kept), cross_q @ cross_k, ridge_lambda)


def split_factors(bilinear: Tensor) -> tuple[Tensor, Tensor]:
    """U = RΣ^½, V = SΣ^½ with UVᵀ = RΣSᵀ = `bilinear` (Eq. 16, 31); [H, s, s] each."""
    R, sigma, St = torch.linalg.svd(bilinear)
    root = sigma.sqrt()[:, None, :]
    return R * root, St.mT * root


def logit_error(gram_q: Tensor, gram_k: Tensor, bilinear: Tensor) -> float:
    """‖QKᵀ - QAKᵀ‖² / ‖QKᵀ‖², summed over heads, over all pairs of calibration tokens; A [H, d, d].

    With D = I - A the difference is QDKᵀ, whose square is tr(G_Q D G_K Dᵀ).
    """
    D = torch.eye(gram_q.shape[1], dtype=gram_q.dtype, device=gram_q.device) - bilinear
    return relative((gram_q @ D @ gram_k * D).sum(), (gram_q * gram_k.mT).sum())


def logit_weights(
    q: Tensor, k: Tensor, v: Tensor, scale: float, counted: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(r [B, H, N], c [B, H, N]): an error of logit (i, j) matters r_i c_j to the outputs o_i = Σ_j P_ij v_j.

    To first order δo_i = Σ_j P_ij δl_ij (v_j - o_i), so that errors which do not go together add up to
    a_ij = P_ij² ‖v_j - o_i‖² each, of query i `counted` [B, 1 or H, N] times. r and c are the sums of a over keys and
    over queries, scaled so that in every image Σ r = Σ counted and Σ c = N; `EVEN` of both stays as without attention,
    and all of it where attention is so sharp that a is lost in rounding. q, k [B, H, N, d], v [B, H, N, dv]; `bias` is
    added to the logits: `merging.size_bias`, of tokens that stand for several.
    """
    P, o = attended(q, k, v, scale, bias)
    S, counted, n = P.square_(), counted.expand(q.shape[:-1]), k.shape[2]
    v = pad(v, (0, 0, 0, S.shape[-1] - n))  # as P is
    of_query, most = _spread(S, o, v, torch.ones_like(v[..., 0]))
    of_key, most_of_key = (x[..., :n] for x in _spread(S.mT, v, o, counted))
    evenly = torch.ones_like(counted)
    return _scaled(counted * of_query, counted * most, counted), _scaled(of_key, most_of_key, evenly)


def _spread(S: Tensor, x: Tensor, y: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ_j S_ij t_j ‖x_i - y_j‖², and the same without what cancels), [B, H, N]."""
    squared = y.square().sum(-1, keepdim=True)
    columns = torch.cat([y, squared, torch.ones_like(squared)], -1) * times[..., None]
    padding = -columns.shape[-1] % ALIGNED
    crossed, alone, count, _ = (S @ pad(columns, (0, padding))).split([y.shape[-1], 1, 1, padding], -1)
    most = (alone + count * x.square().sum(-1, keepdim=True))[..., 0]
    return (most - 2 * (crossed * x).sum(-1)).clamp(min=0), most


def _scaled(found: Tensor, most: Tensor, even: Tensor) -> Tensor:
    """`found` with the sum of `even` in every row, `EVEN` of it as `even`, and more where it is little of `most`."""
    total, doubt = found.sum(-1, keepdim=True), DOUBT * most.sum(-1, keepdim=True)
    share = (found * even.sum(-1, keepdim=True) + doubt * even) / (total + doubt)
    return torch.where(total + doubt > 0, EVEN * even + (1 - EVEN) * share, even)
