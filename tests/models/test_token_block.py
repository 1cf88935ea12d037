"""A last block that updates only what the head reads: same outputs, fewer MACs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from corp_cli.files.checkpoint import load_pruned, write_checkpoint
from corp_cli.measure.macs import count_macs
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import skeleton
from corp_cli.models.resize import pruned_sizes, resize
from corp_cli.models.spec import Manifest, ModelSpec
from corp_cli.models.token_block import needed_tokens, spare_tokens
from tests.support import variants
from tests.support.variants import logits, require_same

# variant → tokens that its head reads; 0 where the last block is left whole
NEEDED = {
    "vit": 1,
    "vit_no_qkv_bias": 1,
    "deit_distilled": 2,
    "deit3_layer_scale": 1,
    "clip_pre_norm": 1,
    "dinov2_registers": 1,
    "dinov2_swiglu_packed": 1,
    "qk_norm": 1,
    "scale_norm": 1,
    "siglip_attention_pool": 0,
    "gap_no_class_token": 0,
    "res_post_norm": 0,
}


@pytest.mark.parametrize("variant", NEEDED)
def test_the_head_reads_the_same(variant: str, tmp_path: Path) -> None:
    model, x = variants.build(variant), variants.images(variant)
    assert needed_tokens(model) == NEEDED[variant]
    if not NEEDED[variant]:
        return
    spared = copy.deepcopy(model)
    spare_tokens(spared, (), NEEDED[variant])
    torch.testing.assert_close(logits(spared, x), logits(model, x), rtol=1e-4, atol=1e-4)
    assert needed_tokens(spared) == 0
    assert [b.sizes for b in blocks_of(spared)] == [b.sizes for b in blocks_of(model)]
    name, args = variants.arguments(variant)
    spec = ModelSpec(name, args, {"input_size": list(x.shape[1:])})
    path = tmp_path / "pruned.safetensors"
    write_checkpoint(spared, Manifest(spec, pruned_sizes(spared, model), {}, "0" * 64), path)
    require_same(logits(load_pruned(path), x), logits(spared, x))


def test_features_keep_their_shape_and_the_other_tokens_stay_as_they_came() -> None:
    model = variants.build("vit")
    spared = copy.deepcopy(model)
    spare_tokens(spared, (), 1)
    with torch.no_grad():
        before, after = (m.get_submodule("blocks.0")(torch.ones(2, 5, 32)) for m in (model, spared))
        torch.testing.assert_close(before, after)
        stream = spared.get_submodule("blocks.1")(before)
    assert stream.shape == before.shape
    assert torch.equal(stream[:, 1:], before[:, 1:])


def test_masks_hold_for_the_tokens_that_ask() -> None:
    model = variants.build("vit")
    spared = copy.deepcopy(model)
    spare_tokens(spared, (), 1)
    mask = torch.rand(1, 1, 5, 5).round().bool() | torch.eye(5).bool()
    stream = torch.randn(2, 5, 32)
    with torch.no_grad():
        whole, part = (m.get_submodule("blocks.1")(stream, attn_mask=mask) for m in (model, spared))
    torch.testing.assert_close(part[:, 0], whole[:, 0])


def test_macs_are_those_of_the_work_that_is_done() -> None:
    name, args = variants.arguments("vit")
    spec = ModelSpec(name, args, {"input_size": [3, 32, 32]})
    dense, spared = skeleton(spec), skeleton(spec)
    spare_tokens(model := variants.build("vit"), (), 1)
    resize(spared, pruned_sizes(model, variants.build("vit")))
    width, tokens, hidden = 32, 5, 128
    # q, proj, QKᵀ, (softmax) V and both layers of the MLP, for all tokens but one
    saved = (tokens - 1) * (2 * width * width + 2 * width * tokens + 2 * width * hidden)
    assert count_macs(dense, [3, 32, 32]) - count_macs(spared, [3, 32, 32]) == saved
