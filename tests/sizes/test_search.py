"""The search by scores: against brute force, within its budget, and as the weights that are left."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corp_cli import load_pruned
from corp_cli.config.prune import RankerConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.method.rank import Scores
from corp_cli.pipeline import prune
from corp_cli.sizes.budget import Budget, make_budget
from corp_cli.sizes.costs import cost_of
from corp_cli.sizes.search import highest_scores, with_tokens
from tests.support.budgets import BLOCKS, DENSE, SPEC, run
from tests.support.figures import known

HIDDEN, HEADS = DENSE[0].mlp, DENSE[0].heads


def scores(seed: int) -> tuple[Scores, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        Scores(mlp=torch.rand(HIDDEN, generator=generator) ** 3, heads=50 * torch.rand(HEADS, generator=generator))
        for _ in BLOCKS
    )


def kept_by(values: list[list[float]], count: int, step: int) -> tuple[list[int], float]:
    """(sizes, their sum of scores) when the `count` best of all blocks stay, in whole steps and at least one each."""
    ranked = sorted(((v, i) for i, of in enumerate(values) for v in of), reverse=True)[:count]
    sizes, total = [], 0.0
    for i, of in enumerate(values):
        taken = sum(owner == i for _, owner in ranked)
        sizes.append(len(of) if taken == len(of) else max(step, taken // step * step))
        total += sum(sorted(of, reverse=True)[: sizes[-1]])
    return sizes, total


@cache
def budget(kind: str) -> Budget:
    return make_budget(SPEC, BLOCKS, SparsityConfig(**{kind: 0.1, "search": "scores"}), DENSE)  # type: ignore[arg-type]


@cache
def costs(kind: str) -> tuple[int, int, int]:
    """Of the model, of a head and of a channel."""
    dense = cost_of(SPEC, BLOCKS, DENSE, kind)
    fewer = (replace(DENSE[0], heads=HEADS - 1), replace(DENSE[0], mlp=HIDDEN - 1))
    head, channel = (dense - cost_of(SPEC, BLOCKS, (sizes, *DENSE[1:]), kind) for sizes in fewer)
    return dense, head, channel


@settings(deadline=None, max_examples=6)
@given(
    seed=st.integers(0, 1000),
    fraction=st.floats(0.02, 0.2),
    kind=st.sampled_from(["macs", "params"]),
    round_to=st.sampled_from([1, 8, 48]),
)
def test_the_search_is_the_loop_over_numbers_of_heads(seed: int, fraction: float, kind: str, round_to: int) -> None:
    found, (dense, of_head, of_channel) = scores(seed), costs(kind)
    chosen, total = highest_scores(replace(budget(kind), fraction=fraction, round_to=round_to), found)
    heads = [known(each.heads).tolist() for each in found]
    channels = [known(each.mlp).tolist() for each in found]
    rows = [kept_by(channels, count, round_to) for count in range(2 * HIDDEN, -1, -1)]
    best, expected = 0.0, DENSE
    for count in range(2 * HEADS + 1):
        h, score = kept_by(heads, count, 1)
        for m, more in rows:
            cost = dense - of_head * (2 * HEADS - sum(h)) - of_channel * (2 * HIDDEN - sum(m))
            if cost <= (1 - fraction) * dense:
                if score + more > best + 1e-6:
                    best = score + more
                    expected = tuple(replace(DENSE[i], heads=h[i], mlp=m[i]) for i in range(2))
                break
    assert chosen == expected
    assert total == pytest.approx(best)


def test_sizes_follow_where_the_scores_are() -> None:
    """All that scores is in the first block: the second is left a head and a step of channels."""
    high = Scores(mlp=torch.rand(HIDDEN) + 1, heads=torch.rand(HEADS) + 100)
    low = Scores(mlp=torch.rand(HIDDEN) / 1e3, heads=torch.rand(HEADS) / 1e3)
    (first, second), _ = highest_scores(replace(budget("macs"), fraction=0.25), (high, low))
    assert (second.mlp, second.heads) == (8, 1)
    assert first.heads == HEADS
    assert first.mlp > HIDDEN // 2


def test_what_cannot_be_met_is_refused() -> None:
    with pytest.raises(CorpError, match=r"sparsity\.macs=0\.99 cannot be met: at most 0\.\d+ of this model"):
        replace(budget("macs"), fraction=0.99).require_met()


def with_places(found: tuple[Scores, ...], *of_blocks: list[float]) -> tuple[Scores, ...]:
    places = [torch.tensor(values, dtype=torch.float64) for values in of_blocks]
    return tuple(replace(each, tokens=tokens) for each, tokens in zip(found, [*places, None], strict=True))


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.4])
def test_tokens_are_searched_with_heads_and_channels(fraction: float) -> None:
    """Whatever is chosen keeps the budget, and no other schedule that could be tried has a larger sum of scores."""
    sparsity = SparsityConfig(macs=fraction, search="scores", merge_tokens=True)
    asked = make_budget(SPEC, BLOCKS, sparsity, DENSE, None, merges=True)
    assert asked.token_costs is not None
    patches = asked.token_costs.tokens - asked.token_costs.prefix
    places = torch.rand(patches, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = with_places(scores(0), (20 * places).tolist())
    sizes, merge = with_tokens(asked, found)
    count = merge[0] if merge else 0
    assert asked.merging((count, 0)).cost(sizes) <= asked.merging((count, 0)).limit + 1

    def total(merged: int) -> float:
        way = asked.merging((merged, 0))
        if way.least > way.limit:
            return -1.0
        kept = (20 * places).sort(descending=True).values[: patches - merged]
        return highest_scores(way, found)[1] + float(kept.sum())

    assert total(count) == pytest.approx(max(map(total, range(sum(asked.token_costs.most()) + 1))))


def test_worthless_tokens_go_first() -> None:
    sparsity = SparsityConfig(macs=0.3, search="scores", merge_tokens=True)
    asked = make_budget(SPEC, BLOCKS, sparsity, DENSE, None, merges=True)
    assert asked.token_costs is not None
    patches = asked.token_costs.tokens - asked.token_costs.prefix
    _, merge = with_tokens(asked, with_places(scores(0), [1e-9] * (patches // 2) + [1e3] * (patches - patches // 2)))
    assert merge == (patches // 2, 0)
    _, merge = with_tokens(asked, with_places(scores(0), [1e3] * patches))
    assert merge == ()


def test_a_search_that_merges_tokens_meets_its_budget(tmp_path: Path) -> None:
    cfg = run(SparsityConfig(macs=0.4, search="scores", merge_tokens=True, skip_unread=False))
    cfg = replace(cfg, ranker=RankerConfig(mlp="optin", heads="optin", optin_images=8))
    report = prune(cfg, tmp_path).report
    assert report.size.removed_percent.macs >= 40
    assert report.sparsity.merged_tokens is not None
    assert sum(report.sparsity.merged_tokens) > 0
    with pytest.raises(CorpError, match="scores of tokens that the ranker optin has"):
        prune(replace(cfg, ranker=RankerConfig(mlp="output", heads="output")))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"latency": 0.3}, "knows no time"),
        ({"macs": 0.3, "heads": 0.5}, "chooses heads as well"),
    ],
)
def test_what_scores_cannot_choose_is_refused(other: dict[str, float], message: str) -> None:
    with pytest.raises(CorpError, match=message):
        SparsityConfig(search="scores", **other)  # type: ignore[arg-type]


@pytest.mark.usefixtures("tiny_digits")
def test_heads_and_channels_are_gone_from_the_weights(tmp_path: Path) -> None:
    from corp_cli.pipeline import prune
    from tests.support.recipes import OPTIN

    cfg = replace(run(SparsityConfig(macs=0.4, search="scores", skip_unread=False)), **OPTIN)
    report = prune(cfg, tmp_path).report
    assert report.size.pruned.macs <= 0.6 * report.size.dense.macs
    assert any(block.pruned.heads < block.dense.heads for block in report.blocks)
    model = load_pruned(tmp_path / "pruned.safetensors")
    for block in report.blocks:
        width, kept = 32, block.pruned
        assert model.get_parameter(f"{block.name}.attn.qkv.weight").shape == (3 * kept.heads * 16, width)
        assert model.get_parameter(f"{block.name}.attn.proj.weight").shape == (width, kept.heads * 16)
        assert model.get_parameter(f"{block.name}.mlp.fc1.weight").shape == (kept.mlp, width)
        assert model.get_parameter(f"{block.name}.mlp.fc2.weight").shape == (width, kept.mlp)
