"""Optimal Brain Surgeon on whole channels: which to remove when the rest may be refitted (Hassibi and Stork, 1993)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from corp_cli.linalg.moments import Moments, plus_diagonal

GROUP = 64  # removals between two updates of H and W
Group = tuple[Tensor, Tensor]  # columns that are removed one after the other, and what each costs
CANDIDATES = 512  # channels among which they are chosen: the cheapest ones at the time


@dataclass(frozen=True)
class Removal:
    """order [r]: channels from the first to the last removed; error [r]: output error after each removal.

    `error[i]` is min over W̃ of E‖W x - W̃ x_S‖² + λ‖W_S - W̃‖² once order[:i+1] are gone (float64).
    """

    order: Tensor
    error: Tensor

    def by_size(self) -> Tensor:
        """The error with every number of channels left, 0..d, once all of them are removed, [d + 1]."""
        return torch.cat([self.error.flip(0), self.error.new_zeros(1)])


def inverse(moments: Moments, ridge_lambda: float) -> Tensor:
    """(Σ + λI)⁻¹ with λ = `ridge_lambda` x mean(diag Σ), never so small that dead channels make Σ singular."""
    covariance = moments.covariance
    d = len(covariance)
    scale = covariance.diagonal().mean()
    ridge = max(ridge_lambda, d * torch.finfo(covariance.dtype).eps) * scale
    if scale == 0:
        return torch.eye(d, dtype=covariance.dtype, device=covariance.device)
    factor = factor_of(plus_diagonal(covariance, ridge))
    if not factor.is_cuda:
        return torch.cholesky_inverse(factor)
    root = torch.linalg.solve_triangular(factor, torch.eye(d, dtype=factor.dtype, device=factor.device), upper=False)
    return root.T @ root  # on a GPU a product takes a fraction of what solving does


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
    return removal_orders([(weight, moments)], ridge_lambda, [removals])[0]


def removal_orders(
    layers: Sequence[tuple[Tensor, Moments]], ridge_lambda: float, removals: Sequence[int | None]
) -> list[Removal]:
    """`removal_order` of several layers: a GPU chooses the groups of all of them in the time of one."""
    running = {i: _removing(*layer, ridge_lambda, removals[i]) for i, layer in enumerate(layers)}
    answers: dict[int, Group | None] = dict.fromkeys(running)
    found: dict[int, Removal] = {}
    while running:
        problems = {}
        for i, layer in list(running.items()):
            try:
                problems[i] = layer.send(answers[i])  # type: ignore[arg-type]  # None at the start, as Python has it
            except StopIteration as end:
                found[i] = end.value
                del running[i]
        answers.update(zip(problems, groups_of(list(problems.values()), len(layers)), strict=True))
    return [found[i] for i in range(len(layers))]


def _removing(
    weight: Tensor, moments: Moments, ridge_lambda: float, removals: int | None
) -> Generator[Tensor, Group, Removal]:
    """The loop of `removal_order`, which gives the problem of every group and is sent what solves it."""
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
        index = index[:count].sort().values
        outputs = W[:, index]
        chosen, cost = yield torch.stack([H[index][:, index], outputs.T @ outputs])
        limit = cheapest[count] if count < left else torch.inf
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


def cheapest_group(problem: Tensor) -> Group:
    """(columns, costs) [b, steps] of the next `GROUP` removals among k candidates of b layers.

    problem [b, 2, k, k]: their part of H and of WᵀW. With h = H_:j / √H_jj and c = G_:j / √H_jj, removing j leaves
    H - hhᵀ and G - xhᵀ - hxᵀ, x = c - ½ c_j h / √H_jj. The h and x are gathered, and only what the next choice needs,
    both diagonals and one column each, is worked out. Waits for no result, so that it can be captured.
    """
    (b, _, k, _), tiny = problem.shape, torch.finfo(problem.dtype).tiny
    steps = min(GROUP, k)
    hs, xs = problem.new_zeros(2, b, steps, k)
    diagonal, norms = problem.diagonal(dim1=2, dim2=3).clone().unbind(1)
    chosen, costs = [], []
    for step in range(steps):
        cost, j = (norms / diagonal).min(1, keepdim=True)
        root = diagonal.gather(1, j).rsqrt()
        h, c = problem.gather(2, j[:, :, None, None].expand(b, 2, 1, k)).unbind(1)  # [b, 1, k], both symmetric
        if step:
            before = j[:, None].expand(b, step, 1)
            h_j, x_j = (past[:, :step].gather(2, before).mT for past in (hs, xs))  # [b, 1, step]
            h = torch.baddbmm(h, h_j, hs[:, :step], alpha=-1)
            c = torch.baddbmm(torch.baddbmm(c, h_j, xs[:, :step], alpha=-1), x_j, hs[:, :step], alpha=-1)
        h, c = h[:, 0] * root, c[:, 0] * root
        x = torch.addcmul(c, h, c.gather(1, j) * root, value=-0.5)
        hs[:, step], xs[:, step] = h, x
        norms = torch.addcmul(norms, h, x, value=-2).clamp_(min=0).scatter_(1, j, torch.inf)
        diagonal = torch.addcmul(diagonal, h, h, value=-1).clamp_(min=tiny)
        chosen.append(j)
        costs.append(cost)
    return torch.cat(chosen, 1), torch.cat(costs, 1)


@cache
def captured(device: torch.device, dtype: torch.dtype, layers: int) -> Callable[[Tensor], Group]:
    """`cheapest_group` of so many layers as a CUDA graph: its many small kernels take longer to launch than run."""
    problem = torch.eye(CANDIDATES, dtype=dtype, device=device).repeat(layers, 2, 1, 1)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        cheapest_group(problem)  # what libraries allocate once must not be captured
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cheapest_group(problem)

    def run(new: Tensor) -> Group:
        problem[: len(new)] = new  # what the others are no longer matters
        graph.replay()
        return found[0].clone(), found[1].clone()

    return run


def groups_of(problems: list[Tensor], layers: int) -> list[Group]:
    """`cheapest_group` of each of `problems` [2, k, k], of up to `layers`; those of a GPU at once, by one graph."""
    if problems and problems[0].is_cuda and {len(problem[0]) for problem in problems} == {CANDIDATES}:
        chosen, costs = captured(problems[0].device, problems[0].dtype, layers)(torch.stack(problems))
        return list(zip(chosen, costs, strict=False))[: len(problems)]
    return [(chosen[0], costs[0]) for chosen, costs in (cheapest_group(problem[None]) for problem in problems)]
