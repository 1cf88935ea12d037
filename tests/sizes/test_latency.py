"""Budgets of time: what is timed, by clocks that show what they are told."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp_cli import prune_model
from corp_cli.config.prune import SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.measure.macs import count_macs
from corp_cli.models.adapter import blocks_of
from corp_cli.models.layer_scale import has_layer_scale
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.spec import ModelSpec
from corp_cli.pipeline import prune
from corp_cli.sizes import latency
from corp_cli.sizes.budget import Budget
from tests.support import variants
from tests.support.budgets import run

MERGE = (1, 1)


def budget(
    variant: str, monkeypatch: pytest.MonkeyPatch, alone: float, by_token: float = 0.0, noise: float = 0.0
) -> Budget:
    """By a clock of 3 s for a model, 10 more for every γ of LayerScale, and 1 for every sublayer.

    Outside of it a sublayer takes `alone`, and `by_token` per token where it is timed by them. noise: what is added to
    the time of a model without its sublayers.
    """
    name, args = variants.arguments(variant)
    dense = LoadedModel("", variants.build(variant), ModelSpec(name, args, {"input_size": [3, 32, 32]}))

    def clock(model: nn.Module, x: Tensor, key: str) -> float:
        if not hasattr(model, "blocks"):
            return alone if key else by_token * x.shape[1]
        parts = (model.get_submodule(path) for block in dense.blocks for path in (block.attn, block.mlp))
        scales = sum(has_layer_scale(model.get_submodule(block.name)) for block in dense.blocks)
        return (
            3
            + noise * (key == "rest")
            + 10 * scales
            + sum(1.0 for part in parts if not isinstance(part, latency.Passing))
        )

    def seconds(models: dict[str, nn.Module], x: Tensor, *_: Any) -> dict[str, list[float]]:
        return {key: [clock(model, x, key)] for key, model in models.items()}

    monkeypatch.setattr(latency, "pass_seconds", seconds)
    asked = SparsityConfig(latency=0.01, round_to=1)
    return latency.latency_budget(dense, asked, tuple(b.sizes for b in dense.blocks), None, by_token > 0)


@pytest.mark.parametrize("alone", [1.0, 2.5])
def test_sublayers_take_what_they_take_within_the_model(alone: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's speed while they were timed alone; and γ, which no pruned model has, is not what stays."""
    found = budget("deit3_layer_scale", monkeypatch, alone)
    assert (found.dense, found.fixed, found.cost(found.base)) == pytest.approx((27, 3, 4))


@pytest.mark.parametrize("by_token", [0.1, 0.7])
def test_merging_tokens_spares_no_more_than_what_sees_them(by_token: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = budget("deit3_layer_scale", monkeypatch, 2.0, by_token)
    assert found.token_costs is not None
    merged = found.merging(MERGE)
    assert merged.fixed - found.token_costs.of_merging(MERGE) == pytest.approx(3)
    whole = found.token_costs.tokens
    seen = [whole, whole - 1, whole - 1, whole - 2]  # by attention and MLP of both blocks
    assert merged.cost(found.base) == pytest.approx(sum(seen) / whole)


def test_sublayers_that_seem_to_take_no_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorpError, match=r"sparsity\.latency=0\.01 cannot be met"):
        budget("vit", monkeypatch, 1.0, 0.1, noise=5)


UNREADABLE = {"scale_attn_norm": True, "scale_mlp_norm": True, "qk_norm": True}


@pytest.mark.parametrize("asked", [{"latency": 0.01}, {"macs": 0.01}, {"latency": 0.01, "merge_tokens": False}])
def test_a_model_of_which_nothing_may_be_cut_is_refused(asked: dict[str, Any]) -> None:
    model = variants.noisy("vit_tiny_patch16_224", {**variants.SMALL, **UNREADABLE})
    settings = [f"sparsity.{key}={str(value).lower()}" for key, value in asked.items()]
    with pytest.raises(CorpError, match=r"cannot be met: at most 0\.000 of this model"):
        prune_model(model, torch.zeros(4, 3, 32, 32), overrides=["sparsity.latency_batch_size=2", *settings])


def test_sublayers_that_cannot_be_read_are_timed_as_they_are() -> None:
    model = variants.build("scale_norm")
    blocks = blocks_of(model)
    base = tuple(block.sizes for block in blocks)
    assert all(sizes.mlp == 0 for sizes in base)
    with torch.inference_mode():
        found = latency.token_seconds(model, blocks, base, None, torch.randn(2, 5, 32), {}, 1.0)
    assert (found.mlp[:, -1] > 0).all()


@pytest.mark.usefixtures("tiny_digits")
def test_a_latency_budget_counts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that shows MACs, a latency budget is a MACs budget."""

    def seconds(models: dict[str, nn.Module], x: Tensor, *_: Any) -> dict[str, list[float]]:
        assert (x.dtype, len(x)) == (torch.bfloat16, 5)
        assert all(p.dtype == x.dtype for m in models.values() for p in m.parameters())
        return {
            name: [1e-9 * count_macs(copy.deepcopy(m).float().to("meta"), x.shape[1:])] for name, m in models.items()
        }

    monkeypatch.setattr(latency, "pass_seconds", seconds)
    asked = SparsityConfig(latency=0.4, curve_images=16, latency_batch_size=5, latency_dtype="bfloat16")
    report = prune(run(asked)).report
    assert 39 < report.size.removed_percent.macs < 48
    expected = report.size.dense.macs / report.size.pruned.macs
    assert report.sparsity.predicted_speedup == pytest.approx(expected, rel=0.05)
    with pytest.raises(CorpError, match=r"sparsity\.latency=0\.97 cannot be met: at most 0\.\d+ of this model"):
        prune(run(replace(asked, latency=0.97)))


def test_grids_reach_from_an_eighth_to_all() -> None:
    assert latency.grid(768, 6) == (96, 224, 360, 496, 632, 768)
    assert latency.grid(16, 4) == (2, 7, 8, 16)
    assert latency.grid(1, 4) == (1,)
