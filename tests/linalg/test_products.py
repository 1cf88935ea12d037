"""Gram matrices of values in bfloat16, with sums in float32: what a GPU does where it may round."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from corp_cli.linalg import products
from corp_cli.linalg.lowrank import one_thread
from corp_cli.linalg.moments import Moments, RunningMoments
from corp_cli.measure.precision import products as in_precision
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
    apart = (found.covariance - exact.covariance).abs() / (spread[:, None] * spread)
    assert 1e-8 < float(apart.max()) < 1e-3
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-5, atol=1e-5)


def some_rows() -> tuple[Tensor, Tensor]:
    """With means that are large beside the deviations: these are taken away before anything is rounded."""
    return (normal(0, 3000, 40) @ normal(1, 40, 40) + 100).float(), normal(2, 3000).abs().float() + 0.1


@pytest.mark.parametrize("weighted", [False, True])
def test_rounded_values_give_nearly_the_same_moments(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = some_rows()
    exact = moments_of(x.double(), weights.double() if weighted else None)
    whole = torch.mm

    def by_cuda(a: Tensor, b: Tensor, out_dtype: Any = None) -> Tensor:
        assert (a.dtype, b.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        return whole(a.float(), b.float())

    monkeypatch.setattr(products, "rounds_products", lambda device: True)
    monkeypatch.setattr(products, "keeps_sums", lambda device: True)
    monkeypatch.setattr(torch, "mm", by_cuda)
    require_rounded(moments_of(x, weights if weighted else None), exact)


def test_a_cpu_rounds_nothing() -> None:
    x, weights = some_rows()
    assert not products.rounds_products(CPU)
    assert products.centred(x, x.mean(0)).dtype == torch.float32
    torch.testing.assert_close(products.centred(x, x.mean(0), weights), (x - x.mean(0)) * weights[:, None])


@pytest.mark.skipif(
    not (os.environ.get("CORP_TEST_CUDA") and torch.cuda.is_available()),
    reason="needs a GPU: CORP_TEST_CUDA=1 pytest tests/linalg/test_products.py -k cuda",
)
def test_on_cuda_values_are_rounded_where_products_are() -> None:
    x, weights = (part.cuda() for part in some_rows())
    exact = moments_of(x.double(), weights.double())
    with in_precision("tf32", x.device):
        require_rounded(moments_of(x, weights), exact)
    with in_precision("float32", x.device):
        torch.testing.assert_close(moments_of(x, weights).covariance, exact.covariance, rtol=1e-5, atol=1e-3)


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError), one_thread():
        torch.linalg.eigh(torch.ones(2, 3))
    assert torch.get_num_threads() == before
