"""What is redundant in a block, against the activations themselves; every kind of attention, or why not."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from corp_cli.measure.redundancy import BlockAnalysis, Redundancy
from corp_cli.method.analyze import PARTS, analyze
from corp_cli.method.calibrate import calibrate
from corp_cli.models.adapter import blocks_of
from tests.support import variants
from tests.support.figures import known

THRESHOLD = 0.05


def analysis(model: nn.Module, x: Tensor) -> list[BlockAnalysis]:
    """On batches of two images."""
    blocks = blocks_of(model)
    with torch.inference_mode():
        statistics = calibrate(model, blocks, x.split(2), frozenset({"mlp", "qk"}))
    return analyze(model, blocks, statistics, x.split(2), THRESHOLD)


def slow(x: Tensor) -> dict[str, float]:
    """A Redundancy by its definitions, of activations x [n, d]."""
    x = x.double()
    values = torch.linalg.svdvals(x - x.mean(0)) ** 2 / len(x)
    share = values / values.sum()
    correlation = x.T.corrcoef().abs() - torch.eye(x.shape[1])
    return {
        "channels": x.shape[1],
        "effective_rank": float(1 / share.square().sum()),
        "rank_ratio": float(1 / share.square().sum() / x.shape[1]),
        "entropy_rank": math.exp(-sum(p * math.log(p) for p in share.tolist() if p > 0)),
        "k95": float((share.cumsum(0) < 0.95).sum() + 1),
        "k95_ratio": float((share.cumsum(0) < 0.95).sum() + 1) / x.shape[1],
        "sparsity": float((x.abs() < THRESHOLD).double().mean()),
        "near_duplicates": float((correlation.amax(0) > 0.95).double().mean()),
        "largest_correlation": float(correlation.amax(0).mean()),
    }


def require_near(found: Redundancy | None, heads: list[Tensor]) -> None:
    """`found` is the mean of what `slow` says of each."""
    wanted = [slow(x) for x in heads]
    for key, value in asdict(known(found)).items():
        assert math.isclose(value, sum(one[key] for one in wanted) / len(wanted), rel_tol=1e-4, abs_tol=1e-6), key


def test_a_vit_is_analysed_by_the_definitions() -> None:
    model, x = variants.build("vit"), variants.images("vit", 40)
    seen: dict[str, Tensor] = {}
    block: nn.Module = model.get_submodule("blocks.1")
    block.get_submodule("mlp.fc2").register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0]))
    handle = block.get_submodule("attn.qkv").register_forward_hook(lambda _, args, out: seen.update(qkv=out))
    variants.logits(model, x)
    hidden, qkv = seen["hidden"].flatten(0, 1), seen["qkv"]
    handle.remove()
    found = analysis(model, x)[1]
    assert found.left_out == {}
    require_near(found.mlp, [hidden])
    q, k, v = qkv.unflatten(-1, (3, 2, -1)).permute(2, 3, 0, 1, 4).double()  # [H, B, N, d] each
    for part, by_head in (("q", q), ("k", k), ("v", v)):
        require_near(getattr(found, part), [head.flatten(0, 1) for head in by_head])
    maps = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    entropy = -(maps * maps.log()).sum(-1).mean()
    assert math.isclose(known(found.attention_entropy).nats, float(entropy), rel_tol=1e-4)
    assert math.isclose(known(found.attention_entropy).relative, float(entropy) / math.log(q.shape[2]), rel_tol=1e-4)
    activation = (q.square().sum(2) * k.square().sum(2)).mean(1)  # [H, d]
    weight = model.get_parameter("blocks.1.attn.qkv.weight").detach().double()
    w_q, w_k, _ = weight.unflatten(0, (3, 2, -1))
    magnitude = w_q.square().sum(-1) * w_k.square().sum(-1)
    pairs = list(zip(activation, magnitude, strict=True))
    assert math.isclose(known(found.qk_ranking).spearman, sum(spearmanr(*p).statistic for p in pairs) / 2, rel_tol=1e-6)
    halves = [{*a.argsort()[8:].tolist()} & {*m.argsort()[8:].tolist()} for a, m in pairs]
    assert math.isclose(known(found.qk_ranking).overlap, sum(len(both) / 8 for both in halves) / 2)


@pytest.mark.parametrize("variant", variants.PATHS)
def test_every_kind_of_attention_is_analysed_or_says_why_not(variant: str) -> None:
    model = variants.build(variant)
    before = variants.logits(model, variants.images(variant))
    found, blocks = analysis(model, variants.images(variant)), blocks_of(model)
    assert [one.name for one in found] == [block.name for block in blocks]
    for one, block in zip(found, blocks, strict=True):
        empty = {part for part in PARTS if getattr(one, part) is None}
        wanted = {"mlp": {"mlp"}, "qk": {"qk_ranking"}}
        assert empty == {part for group in block.refusals if group in wanted for part in wanted[group]}
        assert one.left_out.keys() == empty
        assert all(one.left_out.values())
        assert 0 < known(one.attention_entropy).relative <= 1 + 1e-5
    variants.require_same(variants.logits(model, variants.images(variant)), before)  # no hook is left
