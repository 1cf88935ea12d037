"""Block-by-block repair: what it must leave alone, what it must undo, and the streams it walks along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, PruneConfig, RankerConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import load_pruned, write_checkpoint
from corp_cli.method.calibrate import calibrate
from corp_cli.method.observe import inverse_gain, observe_attention
from corp_cli.method.stream import Rollout, enter_block, rollout_of, start_streams
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Sizes
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest, ModelSpec
from corp_cli.models.streams import enter, head, logits_from, read_tokens, sublayers, tokens
from tests.support import variants
from tests.support.repair import repaired
from tests.support.variants import logits, require_same

CPU = torch.device("cpu")
PATHS = pytest.mark.parametrize("variant", [name for name in variants.PATHS if name != "swiglu"])


def config(**kwargs: object) -> PruneConfig:
    best = {"qk": "lowrank", "vo": "lowrank", "propagate": "sequential", "ridge_lambda": 1e-2, **kwargs}
    return PruneConfig(ranker=RankerConfig(mlp="obs"), compensation=CompensationConfig(**best))  # type: ignore[arg-type]


def repair(model: nn.Module, x: Tensor, sparsity: SparsityConfig, cfg: PruneConfig) -> nn.Module:
    return repaired(model, x, 4, sparsity, cfg.compensation, cfg.ranker)[0]


@PATHS
def test_streams_lead_from_images_to_the_logits_of_the_model(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant)
    with torch.no_grad():
        stream = tokens(model, x)
        for block in blocks_of(model):
            stream = enter(model, block, stream)
            for branch in sublayers(model, block):
                stream = branch.added(stream, branch.branch(stream))
        torch.testing.assert_close(head(model, stream), logits(model, x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits_from(model, tokens(model, x), blocks_of(model)), logits(model, x))


def test_activations_that_overflow_are_named_by_their_block() -> None:
    model, x = variants.build("vit_no_qkv_bias"), variants.images("vit_no_qkv_bias")
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.fc1.weight").mul_(1e25)
    with pytest.raises(CorpError, match=r"Activations of blocks\.1 are NaN or infinite"):
        repair(model, x, SparsityConfig(joint=0.5), config())


@PATHS
def test_nothing_cut_is_the_dense_model(variant: str) -> None:
    """On an undamaged stream every refit must give back the weights it started from."""
    model, x = variants.build(variant), variants.images(variant, 8)
    sparsity = SparsityConfig(joint=0.0)
    torch.testing.assert_close(logits(repair(model, x, sparsity, config()), x), logits(model, x), rtol=1e-3, atol=1e-3)


@PATHS
def test_every_variant_is_cut_and_repaired(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant, 12)
    sparsity = SparsityConfig(mlp=0.5, qk=0.5, vo=0.5, heads=0.5, round_to=1, skip_unsupported=True)
    pruned = repair(model, x, sparsity, config())
    assert logits(pruned, x).isfinite().all()
    for new, old in zip(blocks_of(pruned), blocks_of(model), strict=True):
        refused = old.refusals
        expected = Sizes(
            old.sizes.mlp if "mlp" in refused else round(old.sizes.mlp / 2),
            old.sizes.qk if "qk" in refused else old.sizes.qk // 2,
            old.sizes.vo if "vo" in refused else old.sizes.vo // 2,
            2 if "heads" in refused else 1,
        )
        assert new.sizes == expected


@PATHS
def test_a_model_that_keeps_its_mlp_comes_back(variant: str, tmp_path: Path) -> None:
    """The repair gives biases to layers that had none; the manifest must say so of layers of the dense size too."""
    model, x = variants.build(variant), variants.images(variant, 8)
    pruned = repair(model, x, SparsityConfig(qk=0.5, round_to=1, skip_unsupported=True), config())
    name, args = variants.arguments(variant)
    path = tmp_path / "pruned.safetensors"
    spec = ModelSpec(name, args, {"input_size": list(x.shape[1:])})
    write_checkpoint(pruned, Manifest(spec, pruned_sizes(pruned, model), {}, "0" * 64), path)
    require_same(logits(load_pruned(path), x), logits(pruned, x))


@pytest.mark.parametrize("token_weights", ["class_token", "rollout"])
def test_the_mlp_is_repaired_beside_an_attention_that_cannot_be_read(token_weights: str) -> None:
    model, x = variants.build("deit"), variants.images("deit", 12)
    for block in ("blocks.0", "blocks.1"):
        model.get_submodule(f"{block}.attn").gate = nn.Linear(32, 32)
    sparsity = SparsityConfig(mlp=0.5, qk=0.5, round_to=1, skip_unsupported=True)
    pruned = repair(model, x, sparsity, config(token_weights=token_weights))
    assert [block.sizes.mlp for block in blocks_of(pruned)] == [64, 64]
    assert logits(pruned, x).isfinite().all()


def error(model: nn.Module, pruned: nn.Module, x: Tensor) -> float:
    return float((logits(model, x) - logits(pruned, x)).square().mean())


def test_repair_along_the_stream_beats_ignoring_it() -> None:
    """α = β = 0 answers only to its own inputs; undoing some of the stream's error comes closer to the dense model."""
    model, x = variants.build("deit"), variants.images("deit", 256)
    sparsity = SparsityConfig(joint=0.5, round_to=1)
    found = {a: error(model, repair(model, x, sparsity, config(alpha=a, beta=a)), x) for a in (0.0, 0.3)}
    assert found[0.3] < found[0.0]


@pytest.mark.parametrize(
    ("variant", "reads"),
    [("deit", 1), ("deit_distilled", 2), ("gap_no_class_token", 0), ("siglip_attention_pool", 0), ("registers", 0)],
)
def test_tokens_that_the_head_reads(variant: str, reads: int) -> None:
    assert read_tokens(variants.build(variant)) == reads


@pytest.mark.parametrize("kind", ["uniform", "class_token", "rollout"])
@pytest.mark.parametrize("variant", ["deit", "gap_no_class_token"])
def test_token_weights(kind: str, variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant, 4)
    cfg = CompensationConfig(token_weights=kind, class_token_weight=5, token_floor=0.25)
    with torch.no_grad():
        (weights,) = start_streams(model, blocks_of(model), [x], cfg).weights
    assert weights is not None
    assert weights.shape == (2, 4, tokens(model, x).shape[1])
    if kind == "rollout":
        torch.testing.assert_close(weights.mean(-1), torch.ones(2, 4))  # what is read is shared out, not made
        assert (weights >= 0.25 - 1e-6).all()
    last = weights[-1, 0]
    if variant == "gap_no_class_token" or kind == "uniform":
        torch.testing.assert_close(last, torch.ones_like(last))
    else:
        assert last[0] > last[1:].max()


VARIANTS_WITH_MAPS = "deit", "gap_no_class_token", "beit", "dinov3_swiglu", "siglip_attention_pool"


@pytest.mark.parametrize("variant", VARIANTS_WITH_MAPS)
def test_token_weights_found_along_with_statistics_are_those_found_alone(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant, 6)
    blocks, cfg = blocks_of(model), CompensationConfig()
    rollout = rollout_of(model, cfg)
    assert rollout is not None
    for _ in range(2):  # a pass that begins anew counts alone
        calibrate(model, blocks, x.split(4), frozenset({"mlp", "qk"}), weighs=True, rollout=rollout)
    with torch.no_grad():
        alone = start_streams(model, blocks, x.split(4), cfg)
        known = start_streams(model, blocks, x.split(4), cfg, known=rollout.weights())
    for first, second in zip(alone.weights, known.weights, strict=True):
        assert first is not None
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_token_weights_are_not_found_where_nothing_was_seen_or_they_are_not_asked_for() -> None:
    assert Rollout(0.5).weights() is None
    assert rollout_of(variants.build("deit"), CompensationConfig(token_weights="uniform")) is None
    assert rollout_of(variants.build("swin"), CompensationConfig()) is None


def test_gains_that_hardly_reach_the_stream_are_left_out() -> None:
    found = inverse_gain(torch.tensor([2.0, -0.5, 0.0, 1e-9]))
    assert isinstance(found, Tensor)
    assert found.tolist() == [0.5, -2.0, 0.0, 0.0]
    assert inverse_gain(4.0) == 0.25


def test_logits_are_measured_on_the_pruned_stream() -> None:
    """Not on the dense one, which the same modules see as well."""
    settings = config().compensation
    model, x = variants.build("deit"), variants.images("deit")
    block = blocks_of(model)[1]
    stream = start_streams(model, blocks_of(model), [x], settings)
    enter_block(stream, model, block)
    stream.pruned = [1.5 * stream.dense[0] + 0.3]
    x_hat = stream.pruned[0].clone()
    with torch.no_grad():
        found, _ = observe_attention(stream, model, block, sublayers(model, block)[0], settings, cuts=True)
        module: Any = model.get_submodule(block.name)
        qkv = module.attn.qkv(module.norm1(x_hat))
    width = block.sizes.heads * block.sizes.qk
    k = qkv[..., width : 2 * width].double().unflatten(-1, (block.sizes.heads, -1))
    assert found.logits is not None
    wanted = torch.einsum("bnhi,bnhj->hij", k, k) / k[..., 0, 0].numel()
    torch.testing.assert_close(found.logits.gram_k, wanted, rtol=1e-4, atol=1e-5)
