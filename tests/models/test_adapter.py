"""One contract for every model: what the adapter reads, writes, cuts, and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, RankerConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import load_pruned, write_checkpoint
from corp_cli.method.calibrate import calibrate
from corp_cli.method.compensate import compensate
from corp_cli.method.keep import KeptAttention, KeptUnits, keep
from corp_cli.method.rank import RankerArgs, rank
from corp_cli.models.adapter import attention_weights, block_weights, blocks_of, replace_attention, replace_mlp
from corp_cli.models.attention.plain import PrunedAttention
from corp_cli.models.blocks import Block
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest, ModelSpec
from corp_cli.sizes.uniform import check_supported, uniform_sizes
from tests.support import variants
from tests.support.variants import logits, require_same

CPU = torch.device("cpu")
ALL_GROUPS = frozenset({"mlp", "qk", "vo", "heads"})
PATHS = pytest.mark.parametrize("variant", variants.PATHS)


def allowed(variant: str) -> frozenset[str]:
    return ALL_GROUPS - variants.REFUSED.get(variant, {}).keys()


@PATHS
def test_blocks_have_the_sizes_and_refusals_of_the_model(variant: str) -> None:
    blocks = blocks_of(variants.build(variant))
    staged = ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"]
    assert [block.name for block in blocks] == (staged if "swin" in variant else ["blocks.0", "blocks.1"])
    for block in blocks:
        assert block.refusals.keys() == variants.REFUSED.get(variant, {}).keys()
        for group, word in variants.REFUSED.get(variant, {}).items():
            assert word in block.refusals[group]
        assert block.sizes.heads == 2
        assert block.scale == pytest.approx(1.0 if variant == "swinv2" else block.sizes.qk**-0.5)
        assert (block.sizes.mlp > 0) == ("mlp" not in block.refusals)


@PATHS
def test_weights_written_back_leave_the_model_as_it_was(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant)
    before = logits(model, x)
    for block in blocks_of(model):
        weights = block_weights(model, block)
        if weights.mlp is not None:
            replace_mlp(model, block, weights.mlp)
        assert weights.attn is not None
        replace_attention(model, block, weights.attn)
        assert isinstance(model.get_submodule(block.attn), PrunedAttention)
    torch.testing.assert_close(logits(model, x), before, rtol=1e-4, atol=1e-4)


def kept_sets(block: Block, groups: frozenset[str], generator: torch.Generator) -> KeptUnits:
    """Random kept sets of 1 head of 2 and about half of the rest, for the groups given."""

    def some(dense: int, size: int) -> Tensor:
        return torch.randperm(dense, generator=generator)[:size].sort().values

    heads = some(2, 1) if "heads" in groups else torch.arange(2)

    def dimensions(group: str, dense: int) -> Tensor:
        size = dense // 2 if group in groups else dense
        return torch.stack([some(dense, size) for _ in heads])

    mlp = some(block.sizes.mlp, block.sizes.mlp // 2) if "mlp" in groups else None
    return KeptUnits(mlp, KeptAttention(heads, dimensions("qk", block.sizes.qk), dimensions("vo", block.sizes.vo)))


@torch.no_grad()
def silence(model: nn.Module, block: Block, kept: KeptUnits) -> None:
    """Zero what the pruned units contribute, so that dropping them must change nothing."""
    weights = block_weights(model, block)
    if kept.mlp is not None:
        assert weights.mlp is not None
        fc2 = torch.zeros_like(weights.mlp.fc2)
        fc2[:, kept.mlp] = weights.mlp.fc2[:, kept.mlp]
        replace_mlp(model, block, replace(weights.mlp, fc2=fc2))
    attn = weights.attn
    assert attn is not None
    assert kept.attn is not None
    proj, q = torch.zeros_like(attn.proj), torch.zeros_like(attn.q)
    q_bias = None if attn.q_bias is None else torch.zeros_like(attn.q_bias)
    for head, qk, vo in zip(kept.attn.heads.tolist(), kept.attn.qk, kept.attn.vo, strict=True):
        proj[:, head, vo] = attn.proj[:, head, vo]
        q[head, qk] = attn.q[head, qk]
        if q_bias is not None and attn.q_bias is not None:
            q_bias[head, qk] = attn.q_bias[head, qk]
    replace_attention(model, block, replace(attn, q=q, q_bias=q_bias, proj=proj))


@PATHS
def test_units_that_contribute_nothing_are_cut_without_a_trace(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant)
    generator = torch.Generator().manual_seed(1)
    blocks = blocks_of(model)
    plan = tuple(kept_sets(block, allowed(variant), generator) for block in blocks)
    for block, kept in zip(blocks, plan, strict=True):
        silence(model, block, kept)
    statistics = calibrate(model, blocks_of(model), [x], allowed(variant))
    pruned, _ = compensate(
        model, blocks_of(model), statistics, plan, CompensationConfig(mlp="none", qk="none", vo="none")
    )
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(logits(pruned, x), logits(model, x), rtol=1e-4, atol=1e-4)


def prune_half(model: nn.Module, x: Tensor, groups: frozenset[str]) -> nn.Module:
    blocks = blocks_of(model)
    half: dict[str, Any] = dict.fromkeys(groups, 0.5)
    sparsity = SparsityConfig(**half, round_to=1)
    statistics = calibrate(model, blocks, x.split(2), groups)
    scores = rank(model, blocks, statistics, groups, RankerConfig(), RankerArgs.seeded(0, 1e-3))
    plan = tuple(keep(s, b, uniform_sizes(b, groups, sparsity)) for s, b in zip(scores, blocks, strict=True))
    return compensate(model, blocks, statistics, plan, CompensationConfig())[0]


@PATHS
def test_pruned_models_run_train_and_come_back(variant: str, tmp_path: Path) -> None:
    model, x = variants.build(variant), variants.images(variant, 8)
    pruned = prune_half(model, x, allowed(variant))
    dense_parameters = {name: p.clone() for name, p in model.named_parameters()}
    pruned(x).square().mean().backward()
    learnt = [p for block in blocks_of(pruned) for p in pruned.get_submodule(block.name).parameters()]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learnt)
    assert all(torch.equal(p, dense_parameters[name]) for name, p in model.named_parameters())
    name, args = variants.arguments(variant)
    if "mlp_layer" in args:
        return  # classes as arguments have no place in a manifest
    spec = ModelSpec(name, args, {"input_size": list(x.shape[1:])})
    path = tmp_path / "pruned.safetensors"
    write_checkpoint(pruned, Manifest(spec, pruned_sizes(pruned, model), {}, "0" * 64), path)
    require_same(logits(load_pruned(path), x), logits(pruned, x))


@pytest.mark.parametrize("variant", ["qk_norm", "scale_norm"])
def test_unsupported_groups_are_refused_by_layer_or_skipped_on_request(variant: str) -> None:
    blocks = blocks_of(variants.build(variant))
    for group in variants.REFUSED[variant]:
        asked: dict[str, Any] = {group: 0.5}
        with pytest.raises(CorpError, match=rf"blocks\.0\.\w+ does not allow sparsity\.{group}: .*normalise"):
            check_supported(blocks, SparsityConfig(**asked))
    sparsity = SparsityConfig(mlp=0.5, qk=0.5, vo=0.5, heads=0.5, skip_unsupported=True)
    groups, skipped = check_supported(blocks, sparsity)
    assert groups == ALL_GROUPS
    assert [line.split(":")[0] for line in skipped] == sorted(variants.REFUSED[variant])


def test_gated_attention_is_refused() -> None:
    model = variants.build("vit")
    attn = model.get_submodule("blocks.0.attn")
    attn.gate = nn.Linear(32, 32)
    refusals = blocks_of(model)[0].refusals
    assert set(refusals) == {"qk", "vo", "heads"}
    assert "gates its output" in refusals["qk"]


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("vit_base_patch16_xp_224", variants.SMALL, "blocks.0 is a ParallelScalingBlock"),
        ("vit_small_patch16_18x2_224", variants.SMALL, "blocks.0 is a ParallelThingsBlock"),
        ("resnet10t", {}, "ResNet has no `blocks`"),
    ],
)
def test_other_architectures_are_refused_by_name(name: str, args: dict[str, object], sentence: str) -> None:
    with pytest.raises(CorpError, match=sentence):
        blocks_of(timm.create_model(name, pretrained=False, **args))


def test_differential_attention_is_refused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **{**variants.SMALL, "attn_layer": "diff"})
    assert "DiffAttention" in blocks_of(model)[0].refusals["qk"]


def test_weights_are_split_by_head_as_the_module_splits_them() -> None:
    model = variants.build("vit")
    block, x = blocks_of(model)[0], torch.randn(1, 5, 32)
    weights = attention_weights(model, block)
    qkv = model.get_submodule(f"{block.attn}.qkv")
    q, k, v = qkv(x).reshape(1, 5, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
    assert weights.q_bias is not None
    assert weights.k_bias is not None
    assert weights.v_bias is not None
    for got, weight, bias in (
        (q, weights.q, weights.q_bias),
        (k, weights.k, weights.k_bias),
        (v, weights.v, weights.v_bias),
    ):
        expected = torch.einsum("bnd,hkd->bhnk", x, weight.float()) + bias.float()[:, None]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
