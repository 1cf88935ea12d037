"""Merging of similar tokens: the matching, the blocks that do it, what it costs, and how much a budget asks for."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, PruneConfig, RankerConfig, SparsityConfig
from corp_cli.files.checkpoint import load_pruned, write_checkpoint
from corp_cli.linalg.merging import merge_tokens
from corp_cli.method import sequential
from corp_cli.method.rank import RankerArgs
from corp_cli.method.sequential import compensate_sequentially
from corp_cli.method.stream import Stream, start_streams
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Sizes
from corp_cli.models.loading import skeleton
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest, ModelSpec
from corp_cli.models.streams import logits_from, tokens
from corp_cli.models.token_block import TokenBlock, most_merged, put_token_blocks, spare_tokens
from corp_cli.sizes.budget import make_budget
from corp_cli.sizes.costs import cost_of, mac_costs
from corp_cli.sizes.curves import merge_curve
from corp_cli.sizes.plan import SizePlan
from corp_cli.sizes.schedule import schedules, shortest_path
from tests.support import variants
from tests.support.variants import logits, require_same

SPEC = ModelSpec("deit_tiny_patch16_224", {**variants.SMALL, "depth": 3, "img_size": 64}, {"input_size": [3, 64, 64]})
BLOCKS = blocks_of(skeleton(SPEC))
DENSE = tuple(block.sizes for block in BLOCKS)
CPU = torch.device("cpu")


def slow_merge(x: Tensor, keys: Tensor, sizes: Tensor, prefix: int, count: int) -> tuple[Tensor, Tensor]:
    """merge_tokens for one image [N, D], token by token."""
    first = [(x[i], keys[i], float(sizes[i])) for i in range(prefix)]
    rest = [(x[i], keys[i], float(sizes[i])) for i in range(prefix, len(x))]
    while count > 0:
        seeking, others = rest[::2], rest[1::2]
        pairs = []
        for i, (_, key, _) in enumerate(seeking):
            found = [float(torch.cosine_similarity(key, other, dim=0)) for _, other, _ in others]
            pairs.append((max(found), i, int(np.argmax(found))))
        gone = sorted(pairs, reverse=True)[: min(count, len(others))]
        members = [[other] for other in others]
        for _, i, j in gone:
            members[j].append(seeking[i])
        merged: list[Any] = []
        for group in members:
            size = sum(s for _, _, s in group)
            merged.append((sum(t * s for t, _, s in group) / size, sum(k * s for _, k, s in group) / size, size))
        rest = [each for i, each in enumerate(seeking) if i not in {i for _, i, _ in gone}] + merged
        count -= len(gone)
    every = first + rest
    return torch.stack([t for t, _, _ in every]), torch.tensor([s for _, _, s in every])[:, None].to(x)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(4, 14), prefix=st.integers(0, 2), count=st.integers(0, 12), seed=st.integers(0, 99))
def test_similar_tokens_are_merged_by_their_weighted_mean(n: int, prefix: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, keys = (torch.randn(2, n, d, generator=generator, dtype=torch.float64) for d in (5, 3))
    sizes = torch.randint(1, 4, (2, n, 1), generator=generator).double()
    found, grown = merge_tokens(x, keys, sizes, prefix, count)
    assert found.shape[1] == max(n - count, prefix + 1)
    torch.testing.assert_close(grown.sum(1), sizes.sum(1))
    torch.testing.assert_close((found * grown).sum(1), (x * sizes).sum(1))
    for i in range(2):
        wanted = slow_merge(x[i], keys[i], sizes[i], prefix, min(count, n - prefix - 1))
        torch.testing.assert_close((found[i], grown[i]), wanted)


def test_tokens_that_are_alike_are_merged_without_a_trace() -> None:
    """A token that stands for several is attended to as they were, so the class token does not notice."""
    model = variants.build("vit")
    stream = torch.randn(3, 9, 32)
    stream[:, 5:] = stream[:, 1:5]  # every patch twice, at an even and at an odd place
    stream[:, 1:] = stream[:, [1, 6, 2, 5, 3, 8, 4, 7]]
    merging = copy.deepcopy(model)
    put_token_blocks(merging)
    merging.get_submodule("blocks.0").merge = 4  # type: ignore[assignment]
    with torch.no_grad():
        fewer = merging.get_submodule("blocks.0")(stream)
        assert fewer.shape == (3, 5, 33)
        assert fewer[0, :, -1].tolist() == [1, 2, 2, 2, 2]
        torch.testing.assert_close(*(logits_from(m, stream, blocks_of(model)) for m in (merging, model)))


@pytest.mark.parametrize("variant", ["deit", "deit_distilled", "deit3_layer_scale", "dinov2_registers", "qk_norm"])
def test_merged_models_come_back_and_can_be_trained(variant: str, tmp_path: Path) -> None:
    model, x = variants.build(variant), variants.images(variant, 4)
    merging = copy.deepcopy(model)
    assert most_merged(model) == 3
    spare_tokens(merging, (2, 0), 1)
    assert most_merged(merging) == 0
    assert not torch.equal(logits(merging, x), logits(model, x))
    name, args = variants.arguments(variant)
    spec = ModelSpec(name, args, {"input_size": list(x.shape[1:])})
    path = tmp_path / "pruned.safetensors"
    write_checkpoint(merging, Manifest(spec, pruned_sizes(merging, model), {}, "0" * 64), path)
    loaded = load_pruned(path)
    require_same(logits(loaded, x), logits(merging, x))
    loaded.train()(x).square().mean().backward()
    assert all(p.grad is not None for p in loaded.get_submodule("blocks.0").parameters())


@pytest.mark.parametrize("variant", ["gap_no_class_token", "siglip_attention_pool", "res_post_norm", "dinov3", "beit"])
def test_models_that_need_every_token_merge_none(variant: str) -> None:
    assert most_merged(variants.build(variant)) == 0


def test_smaller_images_than_a_model_was_pruned_for_keep_a_patch() -> None:
    model = variants.build("vit")
    put_token_blocks(model)
    model.get_submodule("blocks.0").merge = 100  # type: ignore[assignment]
    with torch.no_grad():
        assert model.get_submodule("blocks.0")(torch.randn(2, 5, 32)).shape == (2, 2, 33)


# --- costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unread", [None, 1])
@pytest.mark.parametrize("merge", [(3, 0, 0), (0, 8, 0), (11, 2, 0)])
def test_costs_under_a_schedule_are_those_of_the_model(merge: tuple[int, ...], unread: int | None) -> None:
    budget = make_budget(SPEC, BLOCKS, SparsityConfig(macs=0.3), DENSE, unread, merges=True).merging(merge)
    cut = (Sizes(40, 16, 9, 2), Sizes(17, 16, 2, 2), Sizes(64, 16, 5, 2))
    for sizes in (DENSE, cut):
        counted = cost_of(SPEC, BLOCKS, sizes, "macs", unread, merge)
        assert budget.fixed + budget.cost(sizes) == pytest.approx(counted, rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999))
def test_the_shortest_path_is_what_brute_force_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, depth = 4, 4
    curves = np.sort(rng.random((depth - 1, steps)))
    attn, mlp = (np.sort(rng.random((depth, steps)))[:, ::-1] for _ in range(2))
    merging = rng.random((steps, steps)) * (1 - np.eye(steps))

    def length(path: tuple[int, ...]) -> float:
        total, before = 0.0, 0
        for i, behind in enumerate(path):
            total += attn[i, before] + mlp[i, behind] + merging[before, behind] + curves[i, behind] - curves[i, before]
            before = behind
        return total + float(attn[-1, before] + mlp[-1, before])

    rising = (p for p in itertools.product(range(steps), repeat=depth - 1) if list(p) == sorted(p))
    assert length(tuple(shortest_path(curves, attn, mlp, merging))) == pytest.approx(min(map(length, rising)))


def test_more_is_merged_where_it_does_less_damage_and_as_cost_counts_for_more() -> None:
    costs = mac_costs(SPEC, BLOCKS, DENSE, 1)
    few = (costs.tokens - torch.arange(costs.tokens + 1)).double() / costs.tokens
    found = schedules([10 * few**2, 0.1 * few**2], costs)
    assert found[0] == ((0, 0, 0), 0.0)
    counts = [sum(merge) for merge, _ in found]
    assert counts == sorted(counts)
    assert counts[-1] == most_merged(variants.build("deit")) * 4 + 2 == 14
    gentle = next(merge for merge, _ in found if sum(merge) > 4)
    assert gentle[1] > gentle[0]
    hurts = [hurt for _, hurt in found]
    assert hurts == sorted(hurts)


def test_curves_of_merging_rise_as_tokens_go() -> None:
    model = variants.build("deit")
    put_token_blocks(model)
    module = model.get_submodule("blocks.0")
    assert isinstance(module, TokenBlock)
    curve = merge_curve(0, module, 5, 0.5, lambda: float([0.5, 0.5, 0.7, 0.6, 0.9, 0.9][module.merge]))
    assert module.merge == 0
    assert curve.damage[5] == 0
    assert (curve.damage[:-1] >= curve.damage[1:]).all()
    assert curve.damage[2] == pytest.approx(0.2)  # the dip from 0.7 to 0.6 is noise
    assert curve.damage[0] == curve.damage[2]  # less than an eighth of the patches is not looked at


# --- repair ---------------------------------------------------------------------------------------------------


def config(**kwargs: float) -> PruneConfig:
    best = CompensationConfig(qk="lowrank", vo="lowrank", propagate="sequential", ridge_lambda=1e-3, **kwargs)  # type: ignore[arg-type]
    return PruneConfig(ranker=RankerConfig(mlp="obs"), compensation=best)


def repaired(model: nn.Module, x: Tensor, plan: SizePlan, cfg: PruneConfig) -> nn.Module:
    blocks, groups = blocks_of(model), frozenset({"mlp", "qk", "vo"})
    args = RankerArgs.seeded(cfg.seed, cfg.compensation.ridge)
    images, how = x.split(32), cfg.compensation
    pruned, _, _ = compensate_sequentially(model, blocks, plan.sizes, plan.merge, groups, images, cfg.ranker, how, args)
    spare_tokens(pruned, plan.merge, plan.updated_tokens)
    return pruned


def test_repair_undoes_a_part_of_what_merging_does() -> None:
    """On a stream whose tokens are merged as those of the result will be."""
    model, x = variants.build("deit"), variants.images("deit", 256)
    sizes = tuple(block.sizes for block in blocks_of(model))
    plan, wanted = SizePlan(sizes, 1, (2, 0)), logits(model, x)
    bare = copy.deepcopy(model)
    spare_tokens(bare, plan.merge, plan.updated_tokens)
    new = repaired(model, x, plan, config(alpha=0.5, beta=0.5))
    errors = [float((logits(m, x) - wanted).square().mean()) for m in (bare, new)]
    assert errors[1] < 0.9 * errors[0]


def test_the_stream_of_the_repair_is_that_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out of the last block while it is repaired gives the logits of the model that is built in the end."""
    model, x = variants.build("deit"), variants.images("deit", 8)
    streams: list[Stream] = []

    def started(*args: Any) -> Stream:
        streams.append(start_streams(*args))
        return streams[0]

    monkeypatch.setattr(sequential, "start_streams", started)
    sizes = tuple(Sizes(64, 8, 8, 2) for _ in blocks_of(model))
    new = repaired(model, x, SizePlan(sizes, 1, (2, 0)), config())
    (batch,) = streams[0].batches()
    assert batch.sizes is not None
    assert batch.mean is not None
    assert batch.sizes.sum() == 8 * 5
    with torch.no_grad():
        model.norm, model.head = new.norm, new.head
        torch.testing.assert_close(logits_from(model, batch.x_hat, ()), logits(new, x), rtol=1e-4, atol=1e-4)
        whole = tokens(model, x)
        torch.testing.assert_close((batch.pooled(whole) * batch.sizes).sum(1), whole.sum(1))
