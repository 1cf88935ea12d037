"""Blocks with fused residual sums: the same model, under the same names, whatever it is used for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from timm.models.vision_transformer import Block as TimmBlock

from corp_cli.models.adapter import blocks_of, put_module
from corp_cli.models.plain_block import PlainBlock, put_plain_blocks
from tests.support import variants
from tests.support.variants import logits

PATHS = pytest.mark.parametrize("variant", variants.PATHS)


@PATHS
def test_the_model_stays_what_it_is(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant)
    plain = copy.deepcopy(model)
    put_plain_blocks(plain)
    for block in blocks_of(model):
        timms = type(model.get_submodule(block.name)) is TimmBlock
        assert (type(plain.get_submodule(block.name)) is PlainBlock) == timms
    assert blocks_of(plain) == blocks_of(model)
    assert list(plain.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(logits(plain, x), logits(model, x), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_model() -> None:
    model, x = variants.build("deit3_layer_scale"), variants.images("deit3_layer_scale")
    plain = copy.deepcopy(model)
    put_plain_blocks(plain)
    for each in (model, plain):
        each(x).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_paths_are_dropped_in_training_alone() -> None:
    model, x = variants.build("deit3_layer_scale"), variants.images("deit3_layer_scale")
    for block in blocks_of(model):
        put_module(model, f"{block.name}.drop_path2", DropPath(0.9).eval())
    plain = copy.deepcopy(model)
    put_plain_blocks(plain)
    torch.testing.assert_close(logits(plain, x), logits(model, x), rtol=1e-5, atol=1e-5)
    found = []
    for each in (model, plain):
        torch.manual_seed(0)
        found.append(each.train()(x))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0], logits(model.eval(), x), atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_reach_the_attention(causal: bool) -> None:
    block: Any = variants.build("deit3_layer_scale").get_submodule("blocks.0")
    x = torch.randn(2, 5, block.norm1.normalized_shape[0], generator=torch.Generator().manual_seed(0))
    masks = {"is_causal": True} if causal else {"attn_mask": torch.eye(5).bool()}
    torch.testing.assert_close(PlainBlock(block)(x, **masks), block(x, **masks), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(block(x, **masks), block(x), atol=1e-4)


def test_half_precision_is_as_near_as_timms_block() -> None:
    model, x = variants.build("deit3_layer_scale"), variants.images("deit3_layer_scale")
    plain, exact = copy.deepcopy(model), logits(model, x)
    put_plain_blocks(plain)
    errors = [float((logits(m.bfloat16(), x.bfloat16()).float() - exact).abs().max()) for m in (model, plain)]
    assert errors[1] < 2 * errors[0] + 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        logits(plain.float(), x)
