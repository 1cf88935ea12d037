"""Optimal Brain Surgeon on whole channels: which to remove when the rest may be refitted (Hassibi and Stork, 1993)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from corp_cli.linalg.moments import Moments, plus_diagonal

GROUP = 64  # removals between two updates of H and W
CANDIDATES = 512  # channels among which they are chosen: the cheapest ones at the time


@dataclass(frozen=True)
class Removal:
    """order [r]: channels from the first to the last removed; error [r]: output error after each removal.

    `error[i]` is min over W̃ of E‖W x - W̃ x_S‖² + λ‖W_S - W̃‖² once order[:i+1] are gone (float64).
    """

    order: Tensor
    error: Tensor


def inverse(moments: Moments, ridge_lambda: float) -> Tensor:
    """(Σ + λI)⁻¹ with λ = `ridge_lambda` x mean(diag Σ), never so small that dead channels make Σ singular."""
    covariance = moments.covariance
    d = len(covariance)
    scale = covariance.diagonal().mean()
    ridge = max(ridge_lambda, d * torch.finfo(covariance.dtype).eps) * scale
    if scale == 0:
        return torch.eye(d, dtype=covariance.dtype, device=covariance.device)
    return torch.cholesky_inverse(factor_of(plus_diagonal(covariance, ridge)))


def factor_of(a: Tensor) -> Tensor:
    """L with L Lᵀ = a + εI: ε = 0, or the least of d eps mean(diag a) 10ⁿ that makes up for rounding in `a`.

    a [d, d], positive definite but for rounding. Raises torch.linalg.LinAlgError where it is not even nearly so.
    """
    raised, epsilon = a, len(a) * torch.finfo(a.dtype).eps * a.diagonal().mean()
    for _ in range(12):
        factor, info = torch.linalg.cholesky_ex(raised)
        if int(info) == 0:
            return factor
        raised, epsilon = plus_diagonal(a, epsilon), 10 * epsilon
    return torch.linalg.cholesky(raised)


def removal_order(weight: Tensor, moments: Moments, ridge_lambda: float, removals: int | None = None) -> Removal:
    """Greedily remove argmin_j ‖W_:j‖² / H_jj, then W ← W - W_:j H_j: / H_jj and H ← H - H_:j H_j: / H_jj.

    H = (Σ + λI)⁻¹. After every removal W is the ridge solution on the channels left, so the quotient is exactly
    what the next removal costs. weight [o, d]; removals: how many, by default all d. The plain loop spends all its time
    moving the whole of H, so that removals are chosen in groups, each among the channels that are cheapest when it
    begins: what they cost after one another follows from their own part of H and of WᵀW. A group ends where its next
    removal would cost more than the cheapest of the other channels did, so that the order is that of the plain loop
    unless a removal makes one of those cheaper. Then H and W are updated for the group at once, by matrix products.
    """
    H, W = inverse(moments, ridge_lambda), weight.clone()
    d = W.shape[1]
    removals = d if removals is None else removals
    names = torch.arange(d, device=W.device)  # of the columns of H and W
    gone = torch.zeros(d, dtype=torch.bool, device=W.device)
    order: list[Tensor] = []
    costs: list[float] = []
    while len(costs) < removals:
        left = d - len(costs)
        if left < 0.75 * len(names):  # copies cost more than updates of some columns that nobody reads
            stay = (~gone).nonzero().flatten()
            H, W, names, gone = H[stay][:, stay], W[:, stay], names[stay], gone[stay]
        score = (W.square().sum(0) / H.diagonal()).masked_fill_(gone, torch.inf)
        count = min(CANDIDATES, left)
        cheapest, index = score.topk(min(count + 1, left), largest=False)
        limit = float(cheapest[count]) if count < left else torch.inf
        index = index[:count].sort().values
        outputs = W[:, index]
        chosen, cost = group_of(torch.stack([H[index][:, index], outputs.T @ outputs]))
        most = min(removals - len(costs), int((cost[1:] <= limit).long().cumprod(0).sum()) + 1)
        group = index[chosen[:most]]
        order.append(names[group])
        costs += cost[:most].tolist()
        factor = factor_of(H[group][:, group])
        rows = torch.linalg.solve_triangular(factor, H[group], upper=False)
        columns = torch.linalg.solve_triangular(factor, W[:, group].T, upper=False)
        H.addmm_(rows.T, rows, alpha=-1)
        W.addmm_(columns.T, rows, alpha=-1)
        gone[group] = True
    return Removal(
        torch.cat(order) if order else names[:0], torch.tensor(costs, dtype=W.dtype, device=W.device).cumsum(0)
    )


def cheapest_group(problem: Tensor) -> tuple[Tensor, Tensor]:
    """(columns, costs) of the next `GROUP` removals among k candidates; `problem` [2, k, k] is their part of H and WᵀW.

    With h = H_:j / √H_jj and c = G_:j / √H_jj, removing j leaves H - hhᵀ and G - xhᵀ - hxᵀ, x = c - ½ c_j h / √H_jj.
    The h and x are gathered, and only what the next choice needs, both diagonals and one column each, is worked out.
    Waits for no result, so that it can be captured.
    """
    steps, k = min(GROUP, problem.shape[-1]), problem.shape[-1]
    hs, xs = problem.new_zeros(2, steps, k)
    diagonal, norms = problem.diagonal(dim1=1, dim2=2).clone()
    tiny = torch.finfo(problem.dtype).tiny
    chosen, costs = [], []
    for step in range(steps):
        cost, j = (norms / diagonal).min(0, keepdim=True)
        root = diagonal.index_select(0, j).rsqrt()
        h, c = problem.index_select(1, j)[:, 0]
        h_j, x_j = hs[:step].index_select(1, j)[:, 0], xs[:step].index_select(1, j)[:, 0]
        h = torch.addmv(h, hs[:step].T, h_j, alpha=-1) * root
        c = torch.addmv(torch.addmv(c, xs[:step].T, h_j, alpha=-1), hs[:step].T, x_j, alpha=-1) * root
        x = torch.addcmul(c, h, c.index_select(0, j) * root, value=-0.5)
        hs[step], xs[step] = h, x
        norms = torch.addcmul(norms, h, x, value=-2).clamp_(min=0).index_fill_(0, j, torch.inf)
        diagonal = torch.addcmul(diagonal, h, h, value=-1).clamp_(min=tiny)
        chosen.append(j)
        costs.append(cost)
    return torch.cat(chosen), torch.cat(costs)


@cache
def captured(device: torch.device, dtype: torch.dtype, size: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`cheapest_group` of `size` candidates as a CUDA graph: its many small kernels take longer to launch than run."""
    problem = torch.eye(size, dtype=dtype, device=device).repeat(2, 1, 1)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        cheapest_group(problem)  # what libraries allocate once must not be captured
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cheapest_group(problem)

    def run(new: Tensor) -> tuple[Tensor, Tensor]:
        problem.copy_(new)
        graph.replay()
        return found[0].clone(), found[1].clone()

    return run


def group_of(problem: Tensor) -> tuple[Tensor, Tensor]:
    """`cheapest_group`, on a GPU without waiting for the launch of its kernels."""
    if problem.device.type == "cuda" and problem.shape[-1] == CANDIDATES:
        return captured(problem.device, problem.dtype, CANDIDATES)(problem)
    return cheapest_group(problem)
