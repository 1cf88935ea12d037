"""Accuracy, intervals, calibration error and fidelity against what can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.measure.judge import measure
from corp_cli.measure.metrics import ClassResult, RunningFeatures, RunningMetrics, wilson
from corp_cli.measure.results import Evaluation


def of(logits: Tensor, labels: Tensor, reference: Tensor | None = None) -> RunningMetrics:
    running = RunningMetrics()
    running.add(logits, labels, reference)
    return running


@given(st.integers(1, 10**6), st.data())
def test_wilson_as_scipy_has_it(of: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, of))
    wanted = binomtest(hits, of).proportion_ci(0.95, method="wilson")
    assert wilson(hits, of) == pytest.approx((100 * wanted.low, 100 * wanted.high), abs=1e-9)
    assert wilson(0, of)[0] == 0
    assert wilson(of, of)[1] == 100


@given(st.integers(1, 200), st.data())
def test_wilson_holds_the_share_and_narrows(of: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, of))
    low, high = wilson(hits, of)
    assert 0 <= low <= 100 * hits / of <= high <= 100
    more = wilson(4 * hits, 4 * of)
    assert more[1] - more[0] <= high - low + 1e-9


def test_accuracy_by_hand() -> None:
    logits = torch.eye(6)[[0, 1, 2, 3]] * 9
    logits[2:] = torch.tensor([5.0, 4, 3, 2, 1, 0])  # label 4 is the fifth guess, label 5 the last
    found = of(logits, torch.tensor([0, 1, 5, 4])).result()
    assert (found.top1, found.top5) == (50, 75)
    expected = torch.nn.functional.cross_entropy(logits.double(), torch.tensor([0, 1, 5, 4]))
    assert found.loss == pytest.approx(float(expected))
    assert found.agreement is None
    assert found.kl is None


def test_unlabelled_images_count_for_fidelity_only() -> None:
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    running = of(logits, torch.tensor([-1] * 8), logits)
    found = running.result()
    assert found.agreement == 100
    assert found.kl == pytest.approx(0, abs=1e-12)
    assert found.top1 is None
    assert found.top1_interval is None
    assert running.labelled() == 0
    assert running.per_class() == []


def test_kl_by_hand() -> None:
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.5, 0.3, 0.2]])
    found = of(q.log(), torch.tensor([-1]), p.log()).result()
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_several_right_classes() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    running = of(logits, torch.tensor([[1, 0], [2, -1]]))
    found = running.result()
    assert found.top1 == 50
    p = logits.double().softmax(-1)
    assert found.loss == pytest.approx(-float((p[0, 0] + p[0, 1]).log() + p[1, 2].log()) / 2)


def test_calibration_error_of_an_oracle_and_of_a_braggart() -> None:
    """Confidence 0.75 on images of which 3 in 4 are right is calibrated; confidence 1 on the same is 25% off."""
    labels = torch.tensor([0, 0, 0, 1])
    sure = torch.tensor([0.75, 0.25]).log().repeat(4, 1)
    assert of(sure, labels).result().calibration_error == pytest.approx(0, abs=1e-5)
    assert of(torch.tensor([[50.0, -50.0]]).repeat(4, 1), labels).result().calibration_error == pytest.approx(25)


def test_calibration_error_against_a_slow_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = 2 * torch.randn(500, 7, generator=generator), torch.randint(7, (500,), generator=generator)
    confidence, guess = logits.double().softmax(-1).max(-1)
    error = 0.0
    for i in range(15):
        inside = (confidence * 15 >= i) & ((confidence * 15 < i + 1) | (i == 14))
        if inside.any():
            gap = confidence[inside].mean() - (guess[inside] == labels[inside]).double().mean()
            error += float(gap.abs()) * int(inside.sum()) / 500
    assert of(logits, labels).result().calibration_error == pytest.approx(100 * error)


def test_batches_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(60, 9, generator=generator) for _ in range(2))
    labels = torch.randint(-1, 9, (60,), generator=generator)
    whole, parts = of(logits, labels, other), RunningMetrics()
    for part in torch.arange(60).split(7):
        parts.add(logits[part], labels[part], other[part])
    for name, value in vars(whole.result()).items():
        assert getattr(parts.result(), name) == pytest.approx(value)
    assert parts.per_class() == whole.per_class()


def test_per_class() -> None:
    logits = torch.eye(6)[[0, 0, 3]] * 5
    assert of(logits, torch.tensor([0, 2, 3])).per_class() == [
        ClassResult(0, 1, 1, 1),
        ClassResult(2, 1, 0, 1),
        ClassResult(3, 1, 1, 1),
    ]


def test_outputs_that_are_not_finite_are_refused_by_name() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.nan

    batches = [(torch.randn(2, 3), torch.tensor([0, 1]))]
    with pytest.raises(CorpError, match=r"The pruned model gives NaN"):
        measure({"dense": nn.Identity(), "pruned": Broken()}, batches)


# --- features, of models without a classifier -------------------------------------------------------------------


def features_of(features: Tensor, labels: Tensor, reference: Tensor | None = None) -> Evaluation:
    running = RunningFeatures()
    for part in torch.arange(len(features)).split(7):  # batches add up
        running.add(features[part], labels[part], None if reference is None else reference[part])
    assert running.labelled() == int((labels.reshape(len(labels), -1)[:, 0] >= 0).sum())
    return running.result()


@pytest.mark.parametrize("width", [5, 50])  # fewer and more features than images
def test_cka_knows_no_rotation_scale_or_shift(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(20, width, generator=generator) for _ in range(2))
    turned = 3 * x @ torch.linalg.qr(torch.randn(width, width, generator=generator))[0] + 7
    nothing = torch.full((20,), -1)
    assert features_of(turned, nothing, x).cka == pytest.approx(1, abs=1e-5)
    centred_x, centred_y = (t.double() - t.double().mean(0) for t in (x, noise))
    gram_x, gram_y = centred_x @ centred_x.T, centred_y @ centred_y.T
    expected = float((gram_x * gram_y).sum() / (gram_x.norm() * gram_y.norm()))
    found = features_of(noise, nothing, x)
    assert found.cka == pytest.approx(expected)
    assert found.cosine is not None
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(noise, x).mean()), abs=1e-6)
    assert (found.agreement, found.kl, found.top1, found.knn_top1) == (None, None, None, None)


def test_cka_of_features_that_do_not_vary() -> None:
    x = torch.ones(4, 3)
    assert features_of(x, torch.full((4,), -1), x).cka is None


def test_knn_leaves_the_image_itself_out() -> None:
    """Pairs of a class lie close together, one image has a class of its own, and one none: 4 of 5."""
    features = torch.tensor([[1.0, 0.01], [1.0, 0.0], [0.0, 1.0], [0.01, 1.0], [-1.0, 0.1], [5.0, 5.0]])
    labels = torch.tensor([0, 0, 1, 1, 2, -1])
    assert features_of(features, labels).knn_top1 == 80
    assert features_of(features, torch.stack([labels, -torch.ones(6).long()], 1)).knn_top1 == 80


def test_knn_against_a_slow_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(60, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    x[:, 0] += labels
    hits = 0
    for i in range(60):
        similar = torch.cosine_similarity(x[i : i + 1].double(), x.double())
        nearest = [j for j in similar.argsort(descending=True).tolist() if j != i][:20]
        votes = [sum(math.exp(float(similar[j]) / 0.07) for j in nearest if labels[j] == c) for c in range(3)]
        hits += votes.index(max(votes)) == int(labels[i])
    assert features_of(x, labels).knn_top1 == pytest.approx(100 * hits / 60)
