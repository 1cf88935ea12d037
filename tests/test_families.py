"""Every family of timm from prune() to the file: the default recipe, a budget, and what is refused or falls back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from corp_cli.cli.main import main
from corp_cli.config.images import CalibrationConfig, DataConfig, EvaluationConfig
from corp_cli.config.prune import ModelConfig, PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import load_pruned
from corp_cli.linalg import attention
from corp_cli.models.adapter import blocks_of
from corp_cli.models.attention import maps as maps_module
from corp_cli.models.attention.maps import AttentionMaps
from corp_cli.models.spec import ModelSpec
from corp_cli.pipeline import PruneResult, prune
from corp_cli.report.summary import show
from corp_cli.sizes.budget import make_budget, uniform
from corp_cli.sizes.costs import cost_of
from tests.support import variants
from tests.support.documents import in_backticks, read
from tests.support.figures import known
from tests.support.variants import logits, require_same

FAMILIES = (
    "eva_without_rotation",
    "eva02_swiglu_packed",
    "eva02_separate_qkv_sub_norm",
    "dinov3_swiglu",
    "rope_mixed",
    "perception_encoder",
    "beit",
    "sam",
    "swin",
    "swinv2",
)


def photos(size: int, count: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, size, size, 3), generator=generator, dtype=torch.uint8)


def config(name: str, args: dict[str, Any], folder: Path, **sparsity: Any) -> PruneConfig:
    """A model with random weights, on a few random images."""
    torch.save(photos(args["img_size"]), folder / "photos.pt")
    torch.save(variants.noisy(name, args).state_dict(), folder / "dense.pth")
    return PruneConfig(
        model=ModelConfig(name, checkpoint=str(folder / "dense.pth"), args=args),
        sparsity=SparsityConfig(**sparsity),
        calibration=CalibrationConfig(path=str(folder / "photos.pt"), num_images=12, batch_size=6, num_workers=0),
        evaluation=EvaluationConfig(num_workers=0, throughput_batches=0),
        device="cpu",
    )


def run(name: str, args: dict[str, Any], folder: Path, **sparsity: Any) -> PruneResult:
    result = prune(config(name, args, folder, **sparsity), folder)
    x = torch.randn(2, 3, args["img_size"], args["img_size"])
    require_same(logits(load_pruned(folder / "pruned.safetensors"), x), logits(result.model, x))
    return result


def families(*quick: str) -> pytest.MarkDecorator:
    """All of them, of which `quick` take the ways through the code that the others take too."""
    marked = [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in FAMILIES]
    return pytest.mark.parametrize("variant", marked)


@families("rope_mixed", "beit", "swin")
def test_default_recipe(variant: str, tmp_path: Path) -> None:
    name, args = variants.arguments(variant)
    result = run(name, args, tmp_path, joint=0.5, vo=0.5, skip_unsupported=True)
    refused = variants.REFUSED.get(variant, {}).keys()
    left = [line.split(":")[0] for line in result.report.sparsity.skipped]
    assert left == sorted(refused & {"mlp", "qk", "vo"})
    for group, achieved in result.report.sparsity.achieved.items():
        assert achieved == pytest.approx(0 if group in refused | {"heads"} else 0.5, abs=0.05)  # multiples of 8
    assert not any("at once" in warning for warning in result.report.warnings)


@families("eva02_separate_qkv_sub_norm", "sam")
def test_budget(variant: str, tmp_path: Path) -> None:
    name, args = variants.arguments(variant)
    result = run(name, args, tmp_path, macs=0.06, round_to=4, curve_images=4)
    assert result.report.size.removed_percent.macs >= 6
    assert known(result.report.sparsity.predicted_kl) >= 0


@pytest.mark.parametrize(("variant", "more"), [("sam", {"depth": 3}), ("swin", {}), ("beit", {}), ("rope", {})])
def test_costs_of_sizes_are_those_that_are_counted(variant: str, more: dict[str, Any]) -> None:
    """Blocks of equal sizes cost differently where one of them takes windows."""
    name, args = variants.arguments(variant)
    args |= more
    blocks = blocks_of(variants.noisy(name, args))
    spec = ModelSpec(name, args, {"input_size": [3, args["img_size"], args["img_size"]]})
    budget = make_budget(spec, blocks, SparsityConfig(macs=0.01, round_to=1), tuple(block.sizes for block in blocks))
    sizes = uniform(budget, 0.5)
    assert budget.fixed + budget.cost(sizes) == pytest.approx(cost_of(spec, blocks, sizes, "macs"))
    assert budget.fixed + budget.cost(budget.base) == pytest.approx(budget.dense)


@pytest.mark.parametrize(
    ("name", "kind"), [("vit_relpos_small_patch16_224", "VisionTransformerRelPos"), ("xcit_nano_12_p16_224", "Xcit")]
)
def test_blocks_that_cannot_be_walked_are_repaired_at_once(name: str, kind: str, tmp_path: Path) -> None:
    args = variants.SMALL
    result = run(name, args, tmp_path, mlp=0.5)
    assert result.report.sparsity.achieved["mlp"] == 0.5
    assert any(f"how {kind} joins its blocks, so all" in line for line in result.report.warnings)
    with pytest.raises(CorpError, match=r"sparsity\.macs measures damage from block to block, and corp does not know"):
        run(name, args, tmp_path, macs=0.1)


@pytest.mark.parametrize("variant", ["dinov3", "sam"])
def test_backbones_are_judged_by_their_features(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, level in (("dark", 0), ("light", 160)):
        (tmp_path / "eval" / name).mkdir(parents=True)
        for i, pixels in enumerate(photos(32, 4).numpy() // 3 + level):
            Image.fromarray(pixels.astype("uint8")).save(tmp_path / "eval" / name / f"{i}.png")
    name, args = variants.arguments(variant)
    cfg = config(name, {**args, "num_classes": 0}, tmp_path, macs=0.1, round_to=4, curve_images=4)
    report = prune(replace(cfg, evaluation=replace(cfg.evaluation, path=str(tmp_path / "eval"))), tmp_path).report
    found = report.evaluation
    assert found.labelled_images == 8
    for model in (found.dense, found.uncompensated, found.pruned):
        assert 0 <= known(model.knn_top1) <= 100
        assert all(getattr(model, key) is None for key in ("agreement", "kl", "top1", "loss"))
    assert found.dense.cosine == pytest.approx(1)
    assert found.dense.cka == pytest.approx(1)
    assert 0 < known(found.pruned.cosine) < 1
    assert 0 < known(found.pruned.cka) < 1
    show(report, tmp_path)
    shown = capsys.readouterr().out
    assert "k-NN top-1" in shown
    assert "cosine to dense" in shown
    assert "CKA with dense" in shown
    assert "agreement" not in shown
    files = [f"checkpoint={tmp_path}/pruned.safetensors", f"evaluation.path={tmp_path}/eval", "device=cpu"]
    assert main(["evaluate", *files, "evaluation.num_workers=0", f"hydra.run.dir={tmp_path}/again"]) == 0
    again = json.loads((tmp_path / "again/evaluation.json").read_text())
    assert again["results"]["model"]["knn_top1"] == pytest.approx(found.pruned.knn_top1, rel=1e-4)
    assert not (tmp_path / "again/per_class.csv").exists()
    assert "k-NN top-1" in capsys.readouterr().out


def test_latency_of_windows_is_refused(tmp_path: Path) -> None:
    name, args = variants.arguments("swin")
    with pytest.raises(CorpError, match=r"SwinTransformer takes windows of a grid; use sparsity\.macs"):
        run(name, args, tmp_path, latency=0.1)


MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("vit_base_patch16_xp_224", variants.SMALL, "blocks.0 is a ParallelScalingBlock, whose"),
    ("vit_small_patch16_18x2_224", variants.SMALL, "blocks.0 is a ParallelThingsBlock, whose"),
    ("resnet10t", {}, "ResNet has no `blocks`"),
    ("mvitv2_tiny", {}, "MultiScaleVit pools queries, keys and values"),
    ("pvt_v2_b0", {}, "PyramidVisionTransformerV2 has convolutions inside"),
    ("mobilevit_xxs", {}, "ByobNet is built of convolutions"),
    ("levit_128s", {}, "LevitDistilled norms the queries"),
    ("swinv2_cr_tiny_ns_224", {}, "SwinTransformerV2Cr is built otherwise"),
]


@pytest.mark.parametrize(("name", "args", "sentence"), MODELS)
def test_other_architectures_are_refused_with_the_reason(name: str, args: dict[str, Any], sentence: str) -> None:
    with torch.device("meta"), pytest.raises(CorpError, match=sentence):
        blocks_of(timm.create_model(name, pretrained=False, **args))


LAYERS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("eva02_base_patch16_clip_224", {}, {"qk": "rotary", "vo": "all head", "heads": "all head", "mlp": "hidden"}),
    ("vit_large_patch16_sapiens2", {"num_kv_heads": 1}, dict.fromkeys(("qk", "vo", "heads"), "shares keys")),
    ("xcit_nano_12_p16_224", {"num_heads": 4}, dict.fromkeys(("qk", "vo", "heads"), "XCA is not plain")),
    ("vit_relpos_small_patch16_224", {}, dict.fromkeys(("qk", "vo", "heads"), "RelPosAttention is not plain")),
    ("vit_tiny_patch16_224", {"attn_layer": "diff"}, dict.fromkeys(("qk", "vo", "heads"), "DiffAttention")),
]


@pytest.mark.parametrize(("name", "args", "reasons"), LAYERS)
def test_layers_are_refused_with_the_reason(name: str, args: dict[str, Any], reasons: dict[str, str]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, **{"depth": 1, "embed_dim": 32, "num_heads": 2, **args})
    refusals = blocks_of(model)[0].refusals
    assert refusals.keys() == reasons.keys()
    assert all(word in refusals[group] for group, word in reasons.items())


def test_rotary_images_of_another_size_are_refused(tmp_path: Path) -> None:
    name, args = variants.arguments("dinov3")
    cfg = config(name, args, tmp_path, mlp=0.5)
    with pytest.raises(CorpError, match=r"built for 2 x 2 patches, and .* '\+model\.args\.img_size="):
        prune(replace(cfg, data=DataConfig(input_size=[48, 48])))


# Variants that show what an option does, and not a model of timm as it is
OPTIONS = {"qk_norm", "scale_norm", "swiglu", "vit_no_qkv_bias", "vit_no_proj_bias", "vit_grayscale"}


def test_the_table_of_families_says_what_is_tested() -> None:
    lines = read("docs/models.md").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("|") and "no |" in line]
    rows += [line.split("|")[1:-1] for line in lines if "| yes | yes | yes | yes |" in line]
    shown = {}
    for row in rows:
        cells = dict(zip(("mlp", "qk", "vo", "heads"), (cell.strip() for cell in row[2:6]), strict=True))
        shown.update({name: {group for group, cell in cells.items() if cell == "no"} for name in in_backticks(row[1])})
    for variant, (name, _) in variants.VARIANTS.items():
        if variant not in OPTIONS:
            assert shown[name] == variants.REFUSED.get(variant, {}).keys(), name
    for name, _, reasons in LAYERS:
        assert name == "vit_tiny_patch16_224" or shown[name] == reasons.keys(), name
    assert all(len(shown[name]) == 4 for name, _, _ in MODELS)
    assert len(shown) >= 25


def test_an_attention_whose_maps_are_watched_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = variants.build("deit"), variants.images("deit")
    plain, whole = logits(model, x), attention.attended
    monkeypatch.setattr(maps_module, "attended", lambda *args: (whole(*args)[0], 0 * args[2]))
    with AttentionMaps():
        assert not torch.allclose(logits(model, x), plain)  # PyTorch's own kernel had no part in it


@pytest.mark.parametrize("padding", [0, 3])
def test_attention_maps_are_those_of_the_kernel(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "filled_up", lambda q: padding)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 5, 4, generator=generator) for _ in range(3))
    mask = torch.randn(1, 1, 5, 5, generator=generator)
    masks = mask, mask > -1.0
    for given in ({}, {"attn_mask": masks[0]}, {"attn_mask": masks[1]}, {"attn_mask": mask, "scale": 0.3}):
        plain = F.scaled_dot_product_attention(q, k, v, **given)
        with AttentionMaps() as maps:
            out = F.scaled_dot_product_attention(q, k, v, **given)
        torch.testing.assert_close(maps.found[0] @ v[:, 0], plain[:, 0])
        torch.testing.assert_close(out, plain)
    monkeypatch.setattr(maps_module, "MAPS", 30)
    with AttentionMaps() as maps:  # image by image
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(2, 1, 5, 5))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    torch.testing.assert_close(maps.found[0] @ v[:, 0], out[:, 0])
    with AttentionMaps() as maps:
        out = F.scaled_dot_product_attention(query=q, key=k, value=v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    with AttentionMaps():  # what the maps do not know of is left to PyTorch
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(causal, F.scaled_dot_product_attention(q, k, v, is_causal=True))
