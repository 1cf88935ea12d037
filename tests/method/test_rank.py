"""Scores against their formulas, and which units stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corp_cli.config.prune import RANKERS as NAMES
from corp_cli.config.prune import CompensationConfig, RankerConfig
from corp_cli.linalg import attention
from corp_cli.linalg.logits import DOUBT, EVEN, logit_weights
from corp_cli.linalg.lowrank import logit_factors
from corp_cli.linalg.masks import representatives
from corp_cli.method.calibrate import RunningLogits, calibrate
from corp_cli.method.keep import keep, top
from corp_cli.method.rank import RANKERS, RankerArgs, Scores, rank, rank_block, rank_blocks
from corp_cli.method.statistics import BlockStatistics
from corp_cli.models.adapter import block_weights, blocks_of
from corp_cli.models.blocks import AttentionWeights, Block, BlockWeights, MlpWeights, Sizes
from corp_cli.sizes.curves import reconstruction_errors
from corp_cli.sizes.uniform import kept_size
from tests.linalg.test_linalg import correlated, moments_of, normal
from tests.support import variants

HEADS, D, WIDTH = 2, 3, 6
CONTEXT = RankerArgs.seeded(0, 1e-3, (Scores(mlp=torch.arange(5.0), heads=torch.arange(2.0)),))
MLP = MlpWeights((normal(1, 5, WIDTH),), (normal(2, 5),), normal(3, 4, 5), normal(4, 4))
ATTENTION = AttentionWeights(
    normal(5, HEADS, D, WIDTH),
    normal(6, HEADS, D, WIDTH),
    normal(7, HEADS, D, WIDTH),
    None,
    None,
    None,
    normal(8, 4, HEADS, D),
    None,
)
X, OUT = correlated(9, 50, 5), correlated(10, 50, HEADS * D)
QKV = normal(11, 3, 7, 3 * HEADS * D)
BLOCK = Block("blocks.0", "blocks.0.attn", "blocks.0.mlp", Sizes(5, D, D, HEADS), 1.0)


def statistics() -> BlockStatistics:
    logits = RunningLogits(BLOCK, torch.device("cpu"))
    logits.add(QKV[:2])
    logits.add(QKV[2:])
    return BlockStatistics(moments_of(X), logits.result(), moments_of(OUT))


def score(group: str, name: str) -> torch.Tensor:
    return RANKERS[group][name](MLP if group == "mlp" else ATTENTION, statistics(), CONTEXT)


def test_names_are_those_of_the_config() -> None:
    assert {group: tuple(found) for group, found in RANKERS.items()} == NAMES


def test_mlp_activation_is_the_second_moment() -> None:
    """Alg. 2."""
    torch.testing.assert_close(score("mlp", "activation"), X.square().mean(0))


def test_qk_activation_is_the_logit_energy() -> None:
    """Eq. 12, Alg. 4: norms over the tokens of one image, mean over images."""
    q, k, _ = QKV.reshape(3, 7, 3, HEADS, D).unbind(2)
    torch.testing.assert_close(score("qk", "activation"), (q.square().sum(1) * k.square().sum(1)).mean(0))


def test_logit_statistics_are_second_moments_of_all_tokens() -> None:
    found, (q, k, _) = statistics().logits, QKV.reshape(3, 7, 3, HEADS, D).unbind(2)
    assert found is not None
    torch.testing.assert_close(found.gram_q, torch.einsum("bnhi,bnhj->hij", q, q) / 21)
    torch.testing.assert_close(found.gram_k, torch.einsum("bnhi,bnhj->hij", k, k) / 21)
    centred = k - k.mean(1, keepdim=True)
    torch.testing.assert_close(found.gram_k_centred, torch.einsum("bnhi,bnhj->hij", centred, centred) / 21)


def test_weighted_queries_count_more_often() -> None:
    times = torch.tensor([[2.0] + [1.0] * 6, [1.0] * 7, [3.0] * 7]).double()
    running = RunningLogits(BLOCK, torch.device("cpu"))
    running.add(QKV, times)
    q = QKV[..., : HEADS * D].unflatten(-1, (HEADS, D))
    expected = torch.einsum("bn,bnhi,bnhj->hij", times, q, q) / times.sum()
    torch.testing.assert_close(running.result().gram_q, expected)


@pytest.mark.parametrize("counted", [None, torch.tensor([[4.0] + [1.0] * 6, [1.0] * 7, [0.5] * 7]).double()])
@pytest.mark.parametrize("sizes", [None, torch.tensor([3.0, 1, 1, 2, 1, 5, 1]).double().expand(3, 7)[..., None]])
def test_logits_that_attention_reads_count_more(counted: torch.Tensor | None, sizes: torch.Tensor | None) -> None:
    """E[r qqᵀ] and E[c (k - k̄)(k - k̄)ᵀ], with the sums of P_ij² ‖v_j - o_i‖² over keys and over queries.

    Where tokens were merged, P has the logarithm of how many each stands for.
    """
    running = RunningLogits(BLOCK, torch.device("cpu"), weighs=True)
    for part in (slice(0, 2), slice(2, 3)):
        running.add(QKV[part], *(None if given is None else given[part] for given in (counted, sizes)))
    found, times = running.result(), torch.ones(3, 7).double() if counted is None else counted
    seen_q, seen_k = torch.zeros(2, HEADS, D, D).double()
    for b in range(3):
        q, k, v = QKV[b].reshape(7, 3, HEADS, D).permute(1, 2, 0, 3)
        for h in range(HEADS):
            P = (q[h] @ k[h].T + (0 if sizes is None else sizes[b, :, 0].log())).softmax(-1)
            o = P @ v[h]
            a = times[b, :, None] * P.square() * (v[h][None] - o[:, None]).square().sum(-1)
            far = v[h].square().sum(-1)[None] + o.square().sum(-1)[:, None]
            doubt = DOUBT * float((times[b, :, None] * P.square() * far).sum())
            r = EVEN * times[b] + (1 - EVEN) * (a.sum(1) * times[b].sum() + doubt * times[b]) / (a.sum() + doubt)
            c = EVEN + (1 - EVEN) * (a.sum(0) * 7 + doubt) / (a.sum() + doubt)
            seen_q[h] += torch.einsum("i,id,ie->de", r, q[h], q[h])
            centred = k[h] - c @ k[h] / 7
            seen_k[h] += torch.einsum("j,jd,je->de", c, centred, centred)
    torch.testing.assert_close(found.seen_q, seen_q / times.sum())
    torch.testing.assert_close(found.seen_k, seen_k / 21)
    assert found.fitted("weighted_lowrank") == (found.seen_q, found.seen_k)
    assert found.fitted("lowrank") == (found.gram_q, found.gram_k_centred)


def test_weighted_logits_move_what_attention_gives_less() -> None:
    """Maps of half the rank, by weighted and by even statistics, through softmax and values, over several draws."""
    weighted = even = 0.0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = torch.randn(3, 20, 2, 24, 6, generator=generator).double()
        mixes = torch.randn(2, 2, 6, 6, generator=generator).double()
        q, k, ones = 0.5 * q @ mixes[0], k @ mixes[1], torch.ones(20, 1, 24).double()
        weighted += lost(q, k, v, *logit_weights(q, k, v, 1.0, ones))
        even += lost(q, k, v, *(ones.expand(20, 2, 24),) * 2)
    assert weighted < 0.99 * even


def lost(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, r: torch.Tensor, c: torch.Tensor) -> float:
    """What attention gives otherwise with the best logits of rank 3 by weights r and c, squared."""
    centred = k - (c[..., None, :] @ k) / c.sum(-1)[..., None, None]
    grams = ((t * weights[..., None]).mT @ t for t, weights in ((q, r), (centred, c)))
    A, B, _ = logit_factors(*(gram.sum(0) for gram in grams))
    cut = (q @ A[:, :3].mT) @ (k @ B[:, :3].mT).mT
    return float(((q @ k.mT).softmax(-1) @ v - cut.softmax(-1) @ v).square().sum())


def test_weights_of_logits_are_even_where_attention_looks_at_one_token_alone() -> None:
    """What is left of P_ij² ‖v_j - o_i‖² is rounding then, and differs from batch to batch."""
    q = k = 3.5 * torch.eye(6).expand(1, 1, 6, 6)
    r, c = logit_weights(
        q, k, torch.randn(1, 1, 6, 3, generator=torch.Generator().manual_seed(0)), 1.0, torch.ones(1, 1, 6)
    )
    torch.testing.assert_close(r, torch.ones_like(r), atol=1e-2, rtol=0)
    torch.testing.assert_close(c, torch.ones_like(c), atol=1e-2, rtol=0)


def test_weights_of_logits_do_not_see_tokens_that_fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (normal(seed, 2, 3, 7, 4) for seed in (1, 2, 3))
    counted, bias = normal(4, 2, 1, 7).abs(), normal(5, 2, 1, 1, 7)
    for added in (None, bias):
        monkeypatch.setattr(attention, "filled_up", lambda q: 0)
        plain = logit_weights(q, k, v, 0.5, counted, added)
        monkeypatch.setattr(attention, "filled_up", lambda q: 3)
        torch.testing.assert_close(logit_weights(q, k, v, 0.5, counted, added), plain)


def test_blocks_ranked_together_are_ranked_as_alone_and_say_what_mlps_lose() -> None:
    model, x = variants.build("deit"), variants.images("deit", 16)
    blocks, groups = blocks_of(model), frozenset({"mlp", "qk"})
    statistics, args = calibrate(model, blocks, [x], groups), RankerArgs.seeded(0, 0.1)
    found = rank(model, blocks, statistics, groups, RankerConfig(), args)
    some = [(block_weights(model, block), own, block, args) for block, own in zip(blocks, statistics, strict=True)]
    for scores, own, together in zip(found, some, rank_blocks(some, groups, RankerConfig()), strict=True):
        alone = rank_block(*own[:3], groups, RankerConfig(), args)
        for same in (scores, together):
            torch.testing.assert_close((same.mlp, same.qk), (alone.mlp, alone.qk))
        assert alone.lost is None
        assert scores.lost is not None
        again = reconstruction_errors("mlp", own[0], own[1], alone, CompensationConfig(ridge_lambda=0.1))
        torch.testing.assert_close(scores.lost, again)
    half = tuple(replace(block.sizes, mlp=block.sizes.mlp // 2) for block in blocks)
    part = rank(model, blocks, statistics, groups, RankerConfig(), args, half)
    assert all(scores.lost is None for scores in part)  # nothing is known of what was not removed


def test_logits_with_something_added_are_not_weighted() -> None:
    running = RunningLogits(replace(BLOCK, bare_logits=False), torch.device("cpu"), weighs=True)
    running.add(QKV)
    found = running.result()
    assert found.seen_q is None
    assert found.fitted("weighted_lowrank") == (found.gram_q, found.gram_k_centred)


@pytest.mark.parametrize(
    ("group", "name", "expected"),
    [
        ("mlp", "magnitude", MLP.fc1[0].norm(dim=1) * MLP.fc2.norm(dim=0)),
        ("mlp", "variance", X.var(0, correction=0) * MLP.fc2.square().sum(0)),
        ("qk", "magnitude", ATTENTION.q.square().sum(-1) * ATTENTION.k.square().sum(-1)),  # Eq. 36
        ("vo", "activation", OUT.square().mean(0).reshape(HEADS, D)),
        ("vo", "magnitude", ATTENTION.v.norm(dim=-1) * ATTENTION.proj.norm(dim=0)),
        ("heads", "activation", OUT.square().mean(0).reshape(HEADS, D).sum(-1)),
        ("mlp", "output", X.square().mean(0) * MLP.fc2.square().sum(0)),
        (
            "heads",
            "output",
            torch.einsum("nhd,ohd->nho", OUT.reshape(50, HEADS, D), ATTENTION.proj).square().mean(0).sum(-1),
        ),
        ("heads", "optin", torch.arange(2.0)),
    ],
)
def test_scores_are_their_formulas(group: str, name: str, expected: torch.Tensor) -> None:
    torch.testing.assert_close(score(group, name), expected)


def test_kcm_is_how_much_a_channel_stands_for_itself_times_how_it_acts() -> None:
    """R2D2, arXiv 2303.04185; tests/linalg/test_masks.py has the factorisation."""
    stands, acts = representatives(MLP.fc2.T), X.square().mean(0).sqrt()
    torch.testing.assert_close(score("mlp", "kcm"), stands / stands.max() * acts / acts.max())


def test_random_scores_follow_from_the_seed() -> None:
    first, again, other = (
        RANKERS["mlp"]["random"](MLP, statistics(), RankerArgs.seeded(seed, 0.0)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@given(dense=st.integers(1, 600), fraction=st.floats(0, 0.999), round_to=st.integers(1, 64))
def test_kept_sizes_are_rounded_within_bounds(dense: int, fraction: float, round_to: int) -> None:
    size = kept_size(dense, fraction, round_to)
    assert 1 <= size <= dense
    assert size == dense or size % round_to == 0
    if size not in (dense, round_to):
        assert abs(size - dense * (1 - fraction)) <= round_to / 2 + 1e-6


def test_nothing_to_remove_keeps_everything() -> None:
    assert kept_size(80, 0.0, 64) == 80
    assert kept_size(192, 0.5, 8) == 96
    assert kept_size(4, 0.5, 8) == 4


def test_top_is_stable_and_sorted() -> None:
    assert top(torch.tensor([1.0, 3.0, 3.0, 2.0]), 2).tolist() == [1, 2]
    assert top(torch.tensor([[5.0, 5.0, 5.0], [1.0, 2.0, 3.0]]), 2).tolist() == [[0, 1], [1, 2]]


def test_dimensions_are_kept_within_the_kept_heads() -> None:
    scores = Scores(heads=torch.tensor([1.0, 2.0]), qk=torch.tensor([[9.0, 8.0, 7.0], [1.0, 3.0, 2.0]]))
    kept = keep(scores, BLOCK, Sizes(5, 2, D, 1))
    assert kept.mlp is None
    assert kept.attn is not None
    assert (kept.attn.heads.tolist(), kept.attn.qk.tolist(), kept.attn.vo.tolist()) == ([1], [[1, 2]], [[0, 1, 2]])
    assert keep(scores, BLOCK, BLOCK.sizes).attn is None


@pytest.mark.parametrize("name", NAMES["mlp"])
def test_dead_and_constant_channels_go_first(name: str) -> None:
    """They cost nothing: the bias takes their mean."""
    x = X.clone()
    x[:, 1], x[:, 3] = 0.0, 300.1
    weights = MlpWeights((1e-3 * normal(1, 5, WIDTH),), (normal(2, 5),), normal(3, 4, 5) * 1e-3, normal(4, 4))
    weights.fc1[0][3], weights.fc2[:, 3] = 10, 10
    found = BlockStatistics(hidden=moments_of(x.float(), pieces=3))
    scores = rank_block(BlockWeights(None, weights), found, BLOCK, frozenset({"mlp"}), RankerConfig(mlp=name), CONTEXT)
    assert scores.mlp is not None
    assert set(scores.mlp.argsort()[:2].tolist()) == {1, 3}
