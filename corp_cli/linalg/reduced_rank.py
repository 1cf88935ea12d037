"""Values and outputs of all heads at once: reduced-rank regression of y on what attention gathers (Izenman, 1975).

The output of attention is Σ_h M_h u_h + c, with u_h what the attention of head h gathers of its inputs and M_h of the
rank that its values have. One M_h after the other has a closed form: ridge regression, then the SVD in the metric of
its Gram matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from corp_cli.linalg.fit import Fit
from corp_cli.linalg.moments import Moments, relative
from corp_cli.linalg.ridge import regularise, solve_spd, squared_error


@dataclass(frozen=True)
class HeadMaps:
    """ŷ = Σ_h D_h E_h u_h + b: encode E [H, k, D], decode D [H, O, k]; float64. b follows from the means."""

    encode: Tensor
    decode: Tensor

    def maps(self) -> Tensor:
        """The maps side by side, [O, H D]."""
        return (self.decode @ self.encode).movedim(0, 1).flatten(1)

    def bias(self, joint: Moments) -> Tensor:
        """b = μ_y - Σ_h D_h E_h μ_h, [O]."""
        maps = self.maps()
        return joint.mean[maps.shape[1] :] - maps @ joint.mean[: maps.shape[1]]

    def error(self, joint: Moments, bias: Tensor) -> float:
        """E‖y - ŷ‖² / E‖y - μ_y‖²."""
        maps = self.maps()
        return relative(squared_error(maps, bias, joint), joint.covariance.diagonal()[maps.shape[1] :].sum())


def reduced_rank(
    start: HeadMaps, towards: Tensor, fitted: Moments, held_out: Moments, ridges: Sequence[float], sweeps: int
) -> tuple[HeadMaps, Fit]:
    """`start` after up to `sweeps` sweeps over the heads, with the λ of `ridges` that is best on `held_out`.

    fitted, held_out: moments of u of all heads and y side by side, [H D + O]; towards [H, O, D]: the maps before values
    were cut. A sweep is taken only where the error on `held_out` falls, so that nothing is made worse.
    """

    def errors(heads: HeadMaps) -> tuple[float, float]:
        bias = heads.bias(fitted)
        return heads.error(fitted, bias), heads.error(held_out, bias)

    heads, taken = start, list[float]()
    first = now = errors(heads)
    for _ in range(sweeps):
        grid = taken[:1] or ridges
        every = [(errors(swept), ridge, swept) for ridge in grid for swept in [sweep(heads, towards, fitted, ridge)]]
        found, ridge, swept = min(every, key=lambda one: one[0][1])
        if not found[1] < now[1]:
            break
        heads, now = swept, found
        taken.append(ridge)
    return heads, Fit(len(taken), tuple(taken), (first[0], now[0]), (first[1], now[1]))


def sweep(heads: HeadMaps, towards: Tensor, joint: Moments, ridge_lambda: float) -> HeadMaps:
    """Each head in turn: argmin E‖r - M u_h‖² + λ‖M - M⁰_h‖² over M of its rank, r what the others leave of y.

    With M* the ridge solution and G = Σ_hh + λI, that is ‖(M - M*) G^½‖², least for M = UUᵀM* with the first left
    singular vectors U of M* G^½.
    """
    count, rank, width = heads.encode.shape
    encode, decode, maps = heads.encode.clone(), heads.decode.clone(), heads.maps()
    covariance, inputs = joint.covariance, count * width
    cross = covariance[inputs:, :inputs]
    for h in range(count):
        own = slice(h * width, (h + 1) * width)
        gram = covariance[own, own]
        regularised, ridge = regularise(gram, ridge_lambda)
        left = cross[:, own] - maps @ covariance[:inputs, own] + maps[:, own] @ gram
        best = solve_spd(regularised, (left + ridge * towards[h]).T).T
        _, vectors = torch.linalg.eigh(best @ regularised @ best.T)
        decode[h] = vectors[:, -rank:]
        encode[h] = decode[h].T @ best
        maps[:, own] = decode[h] @ encode[h]
    return replace(heads, encode=encode, decode=decode)
