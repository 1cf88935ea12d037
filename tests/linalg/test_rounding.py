"""Gram matrices of values in bfloat16, with sums in float32: what a GPU does where it may round."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from corp_cli.linalg import rounding
from corp_cli.linalg.gauss_newton import FINE, Layers, Tokens, error, gauss_newton, solve_second
from corp_cli.linalg.lowrank import one_thread
from corp_cli.linalg.moments import Moments, RunningMoments
from corp_cli.measure.precision import products
from tests.linalg.test_linalg import normal

CPU = torch.device("cpu")


def moments_of(x: Tensor, weights: Tensor | None) -> Moments:
    running = RunningMoments(x.shape[1], x.device)
    for start in range(0, len(x), 300):
        some = slice(start, start + 300)
        running.add(x[some], None if weights is None else weights[some])
    return running.result()


def require_rounded(found: Moments, exact: Moments) -> None:
    """Apart by what bfloat16 rounds of each value, and by no more."""
    spread = exact.covariance.diagonal().sqrt()
    apart = (found.covariance.detach() - exact.covariance).abs() / (spread[:, None] * spread)
    assert 2e-5 < float(apart.max()) < 1e-3  # float32 comes to 5e-7
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-5, atol=1e-5)


def some_rows() -> tuple[Tensor, Tensor]:
    """With means that are large beside the deviations: these are taken away before anything is rounded."""
    return (normal(0, 3000, 40) @ normal(1, 40, 40) + 100).float(), normal(2, 3000).abs().float() + 0.1


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA does, by values that are rounded and multiplied in float32."""
    whole = torch.mm

    def by_cuda(a: Tensor, b: Tensor, out_dtype: Any = None, **how: Any) -> Tensor:
        if out_dtype is None:
            return whole(a, b, **how)
        assert (a.dtype, b.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        return whole(a.float(), b.float())

    monkeypatch.setattr(rounding, "rounds_products", lambda device: True)
    monkeypatch.setattr(rounding, "keeps_sums", lambda device: True)
    monkeypatch.setattr(torch, "mm", by_cuda)


@pytest.mark.usefixtures("as_a_gpu")
@pytest.mark.parametrize("weighted", [False, True])
def test_rounded_values_give_nearly_the_same_moments(weighted: bool) -> None:
    x, weights = some_rows()
    exact = moments_of(x.double(), weights.double() if weighted else None)
    require_rounded(moments_of(x, weights if weighted else None), exact)
    require_rounded(moments_of(x.requires_grad_(), weights if weighted else None), exact)


@pytest.mark.usefixtures("as_a_gpu")
@pytest.mark.parametrize("act", [torch.relu, F.gelu])
def test_values_that_are_rounded_alike_move_variances_little(act: Callable[[Tensor], Tensor]) -> None:
    x = act(normal(3, 25_000, 8) - 1).float()
    found, exact = moments_of(x, None).covariance, moments_of(x.double(), None).covariance
    spread = exact.diagonal().sqrt()
    assert float(((found - exact).abs() / (spread[:, None] * spread)).max()) < 1e-3


@pytest.mark.usefixtures("as_a_gpu")
def test_small_errors_are_found_token_by_token() -> None:
    """Of moments of rounded values, a tenth of such an error would be rounding, and no round would be taken."""
    z, teacher = normal(4, 4000, 6).float(), normal(5, 40, 6).float()
    readout = (normal(6, 5, 40) * 0.7 ** torch.arange(40)).float()
    y = F.gelu(z @ teacher.T) @ readout.T
    tokens = Tokens(z, y, torch.full((len(z),), 1 / len(z)))
    start = Layers(teacher[None, :16], readout[:, :16], torch.zeros(5))
    lost, solved = solve_second(start, F.gelu, tokens, 1e-6)
    assert lost < FINE
    assert lost == pytest.approx(error(solved, F.gelu, tokens))
    assert gauss_newton(solved, F.gelu, tokens, tokens, (0.01,), 2, 1e-6)[1].rounds == 2


def test_a_cpu_rounds_nothing() -> None:
    x, weights = some_rows()
    assert not rounding.rounds_products(CPU)
    assert rounding.centred(x, x.mean(0)).dtype == torch.float32
    torch.testing.assert_close(rounding.centred(x, x.mean(0), weights), (x - x.mean(0)) * weights[:, None])


@pytest.mark.skipif(rounding.keeps_sums(CPU), reason="this PyTorch multiplies bfloat16 into float32 on a CPU")
def test_bfloat16_is_multiplied_where_sums_are_rounded_too() -> None:
    x = normal(7, 300, 8).bfloat16()
    running = RunningMoments(8, CPU)
    running.add(x)
    assert rounding.product(x.T, x).dtype == torch.bfloat16
    assert running.result().covariance.isfinite().all()


def test_a_device_without_memory_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **how: Any) -> Tensor:
        raise torch.OutOfMemoryError("full")

    rounding.keeps_sums.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", full)
        with pytest.raises(torch.OutOfMemoryError):
            rounding.keeps_sums(CPU)
    assert rounding.keeps_sums(CPU) in (True, False)


@pytest.mark.skipif(
    not (os.environ.get("CORP_TEST_CUDA") and torch.cuda.is_available()),
    reason="needs a GPU: CORP_TEST_CUDA=1 pytest tests/linalg/test_rounding.py -k cuda",
)
def test_on_cuda_values_are_rounded_where_products_are() -> None:
    x, weights = (part.cuda() for part in some_rows())
    exact = moments_of(x.double(), weights.double())
    with products("tf32", x.device):
        assert rounding.centred(x, x.mean(0)).dtype == torch.bfloat16
        require_rounded(moments_of(x, weights), exact)
    with products("float32", x.device):
        torch.testing.assert_close(moments_of(x, weights).covariance, exact.covariance, rtol=1e-5, atol=1e-3)


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError), one_thread():
        torch.linalg.eigh(torch.ones(2, 3))
    assert torch.get_num_threads() == before
