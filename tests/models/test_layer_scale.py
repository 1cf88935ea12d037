"""LayerScale in the linear layers before it: the same model with fewer operations, from pruning to a file and back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from corp_cli import prune_model
from corp_cli.files.checkpoint import load_pruned
from corp_cli.files.manifest import read_manifest
from corp_cli.models.adapter import blocks_of, sharing
from corp_cli.models.layer_scale import fold_layer_scale, has_layer_scale
from corp_cli.models.loading import parameters
from corp_cli.models.plain_block import put_plain_blocks
from corp_cli.models.resize import pruned_sizes, resize
from corp_cli.models.spec import ModelSpec
from corp_cli.sizes.costs import cost_of, dense_cost
from tests.support import variants
from tests.support.variants import logits

SCALED = "deit3_layer_scale", "dinov2_swiglu_packed", "registers", "dinov3", "rope_mixed", "beit"


def scaled(model: nn.Module) -> list[bool]:
    return [has_layer_scale(model.get_submodule(block.name)) for block in blocks_of(model)]


@pytest.mark.parametrize("variant", SCALED)
def test_the_model_stays_what_it_is(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant)
    before = logits(model, x)
    folded = sharing(model)
    fold_layer_scale(folded)
    assert all(scaled(model))
    assert not any(scaled(folded))
    torch.testing.assert_close(logits(folded, x), before, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(model, x), before), "the model that it shared its weights with has changed"
    put_plain_blocks(folded)
    torch.testing.assert_close(logits(folded, x), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["vit_no_qkv_bias", "res_post_norm", "swin"])
def test_what_has_none_is_left_alone(variant: str) -> None:
    model = variants.build(variant)
    parameters = list(model.parameters())
    fold_layer_scale(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))


def test_a_block_of_which_a_branch_cannot_be_read_keeps_its_own() -> None:
    model: Any = variants.noisy("vit_tiny_patch16_224", {**variants.SMALL, "init_values": 0.1, "scale_mlp_norm": True})
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = logits(model, x)
    fold_layer_scale(model)
    assert all(scaled(model))
    assert torch.equal(logits(model, x), before)


@pytest.mark.parametrize("variant", ["deit3_layer_scale", "registers", "rope_mixed"])
def test_budgets_and_dry_runs_count_a_model_without_it(variant: str) -> None:
    name, args = variants.arguments(variant)
    model, spec = variants.build(variant), ModelSpec(name, args, {"input_size": [3, 32, 32]})
    blocks = blocks_of(model)
    fold_layer_scale(model)
    assert cost_of(spec, blocks, tuple(block.sizes for block in blocks), "params") == parameters(model)
    assert dense_cost(spec, "params") == parameters(variants.build(variant)) > parameters(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_before(dtype: torch.dtype) -> None:
    """Weights are rounded once more, γ as small as trained ones get: that must not show."""
    model, x = variants.build("deit3_layer_scale"), variants.images("deit3_layer_scale")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.mul_(1e-3)
    exact, folded = logits(model, x), copy.deepcopy(model)
    fold_layer_scale(folded)
    errors = [float((logits(m.to(dtype), x.to(dtype)).float() - exact).abs().max()) for m in (model, folded)]
    assert errors[1] < 2 * errors[0] + 1e-3


@pytest.mark.parametrize("variant", ["deit3_layer_scale", "dinov3"])
def test_a_resized_skeleton_takes_the_folded_weights(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant)
    folded = copy.deepcopy(model)
    fold_layer_scale(folded)
    twin = variants.build(variant, seed=1)
    resize(twin, pruned_sizes(folded, model))
    twin.load_state_dict(folded.state_dict())
    torch.testing.assert_close(logits(twin, x), logits(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["deit3_layer_scale", "dinov3"])
def test_a_pruned_model_has_none_and_its_file_says_so(variant: str, tmp_path: Path) -> None:
    model = variants.build(variant)
    before, x = copy.deepcopy(model.state_dict()), variants.images(variant)
    images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    (tmp_path / "one.yaml").write_text("blocks:\n  blocks.1: {mlp: 64}\n")
    settings = ["evaluation.throughput_batches=0", f"sparsity.plan={tmp_path}/one.yaml"]
    pruned = prune_model(model, images, overrides=settings, output_dir=tmp_path / "cut").model
    assert not any(scaled(pruned)), "blocks that are not cut are to be as fast"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    path = tmp_path / "cut/pruned.safetensors"
    sizes = read_manifest(path).blocks
    assert [sizes[f"blocks.{i}"].folded for i in range(2)] == [True, True]
    assert sizes["blocks.0"].mlp is None
    loaded = load_pruned(path)
    assert list(loaded.state_dict()) == list(pruned.state_dict())
    torch.testing.assert_close(logits(loaded, x), logits(pruned, x), rtol=1e-5, atol=1e-6)
