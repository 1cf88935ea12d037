"""MACs and parameters from shapes, on the meta device: the table of shapes, to the last parameter."""

from __future__ import annotations

import pytest
import timm
import torch

from corp_cli.measure.macs import count_macs
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Block
from corp_cli.models.loading import parameters, skeleton
from corp_cli.models.resize import resize
from corp_cli.models.spec import AttentionSizes, MlpSizes, ModelSpec, PrunedSizes

COLUMNS: tuple[set[str], ...] = (set(), {"mlp"}, {"qk"}, {"mlp", "qk"}, {"mlp", "qk", "vo"})

# model → (parameters, MACs of one 224 x 224 image in units of 1e9) dense, mlp .5, qk .5, joint .5, joint + vo .5
TABLE = {
    "deit_tiny_patch16_224": (
        (5_717_416, 1.254),
        (3_943_336, 0.905),
        (5_272_744, 1.122),
        (3_498_664, 0.773),
        (3_055_144, 0.641),
    ),
    "deit_small_patch16_224": (
        (22_050_664, 4.599),
        (14_963_560, 3.205),
        (20_276_584, 4.161),
        (13_189_480, 2.767),
        (11_417_704, 2.329),
    ),
    "deit_base_patch16_224": (
        (86_567_656, 17.564),
        (58_237_672, 11.986),
        (79_480_552, 15.991),
        (51_150_568, 10.413),
        (44_068_072, 8.840),
    ),
    "deit3_large_patch16_224": (
        (304_374_760, 61.555),
        (203_662_312, 41.724),
        (279_184_360, 56.120),
        (178_471_912, 36.289),
        (153_293_800, 30.855),
    ),
    "deit3_huge_patch14_224": (
        (632_126_440, 167.295),
        (422_329_320, 113.398),
        (579_656_680, 152.468),
        (369_859_560, 98.571),
        (317_410_280, 83.745),
    ),
}


def halved(block: Block, groups: set[str]) -> PrunedSizes:
    s = block.sizes
    qk, vo = s.qk // 2 if "qk" in groups else s.qk, s.vo // 2 if "vo" in groups else s.vo
    attn = AttentionSizes(s.heads, qk, vo, block.scale, True, True) if groups & {"qk", "vo"} else None
    return PrunedSizes(attn, MlpSizes(s.mlp // 2, True) if "mlp" in groups else None)


@pytest.mark.parametrize("name", TABLE)
def test_table_of_shapes(name: str) -> None:
    for groups, expected in zip(COLUMNS, TABLE[name], strict=True):
        model = skeleton(ModelSpec(name, {}, {}))
        resize(model, {block.name: halved(block, groups) for block in blocks_of(model)})
        assert (parameters(model), round(count_macs(model, (3, 224, 224)) / 1e9, 3)) == expected


def test_unfused_attention_counts_the_same() -> None:
    fused = timm.create_model("deit_tiny_patch16_224", depth=1, device="meta")
    unfused = timm.create_model("deit_tiny_patch16_224", depth=1, device="meta")
    unfused.blocks[0].attn.fused_attn = False
    assert count_macs(fused, (3, 224, 224)) == count_macs(unfused, (3, 224, 224))


def test_counting_a_convolution_and_a_linear_by_hand() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2, stride=2), torch.nn.Flatten(), torch.nn.Linear(16, 5))
    assert count_macs(model, (3, 4, 4)) == 4 * 4 * 3 * 2 * 2 + 16 * 5
