"""A pruned model is a timm model: features come out, heads are replaced, and timm.create_model builds it."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import corp_cli
from corp_cli.cli.main import main
from corp_cli.errors import CorpError
from corp_cli.export import timm_entry
from corp_cli.files.checkpoint import load_pruned, write_checkpoint
from corp_cli.files.fetch import WEIGHTS
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest, ModelSpec
from tests.models.test_adapter import allowed, prune_half
from tests.support import variants
from tests.support.documents import ROOT
from tests.support.variants import logits

PATHS = pytest.mark.parametrize("variant", variants.PATHS)
DATA: dict[str, Any] = {
    "input_size": [3, 32, 32],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "crop_mode": "center",
}


def pruned(variant: str) -> Any:
    """The variant with half of every group gone."""
    return prune_half(variants.build(variant), variants.images(variant), allowed(variant)).eval()


@PATHS
@torch.no_grad()
def test_features_come_out_of_a_pruned_model(variant: str) -> None:
    model, x = pruned(variant), variants.images(variant)
    features = model.forward_features(x)
    torch.testing.assert_close(model.forward_head(features), model(x))
    if not isinstance(model, VisionTransformer):
        return  # timm's other classes have fewer of these methods
    final, between = model.forward_intermediates(x, norm=True, output_fmt="NLC", return_prefix_tokens=True)
    torch.testing.assert_close(final, features)
    tokens, prefix = between[-1] if model.num_prefix_tokens else (between[-1], features[:, :0])
    torch.testing.assert_close(torch.cat([prefix, tokens], 1), features)
    (last,) = model.get_intermediate_layers(x, n=1, norm=True)
    torch.testing.assert_close(last, tokens)
    only = model.forward_intermediates(x, indices=[0], intermediates_only=True)
    assert [maps.shape[:2] for maps in only] == [(3, 32)]


@PATHS
def test_a_new_head_can_be_trained(variant: str) -> None:
    model, x = pruned(variant), variants.images(variant)
    model.reset_classifier(5)
    model.train()
    out = model(x)
    assert out.shape == (3, 5)
    out.square().mean().backward()
    frozen = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert frozen == []
    model.reset_classifier(0)
    assert model.eval()(x).shape == (3, model.num_features)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `corp export format=timm` writes, of a small pruned model."""
    path = tmp_path_factory.mktemp("timm")
    dense, model = variants.build("deit3_layer_scale"), pruned("deit3_layer_scale")
    name, args = variants.arguments("deit3_layer_scale")
    spec = ModelSpec(name, args, DATA)
    write_checkpoint(model, Manifest(spec, pruned_sizes(model, dense), {}, ""), path / WEIGHTS)
    timm_entry.write_config(spec, path)
    return path


def test_folder_for_timm(folder: Path) -> None:
    corp_cli.register()
    corp_cli.register()  # once more changes nothing
    model, x = timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), variants.images("deit3_layer_scale")
    torch.testing.assert_close(logits(model, x), logits(load_pruned(folder / "model.safetensors"), x))
    assert timm.data.resolve_model_data_config(model) == DATA
    other = timm.create_model(f"local-dir:{folder}", pretrained=False).eval()
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in model.parameters())
    assert not torch.allclose(logits(other, x), logits(model, x))


def test_checkpoint_for_timm_with_a_new_head_and_stochastic_depth(folder: Path) -> None:
    corp_cli.register()
    weights = folder / "model.safetensors"
    model: Any = timm.create_model("corp_pruned", checkpoint=weights, num_classes=3, drop_path_rate=0.2)
    assert model(variants.images("deit3_layer_scale")).shape == (3, 3)
    assert model.default_cfg["num_classes"] == 3
    assert model.blocks[1].drop_path1.drop_prob == pytest.approx(0.2)
    same = load_pruned(weights).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in model.state_dict().items() if "head" not in name)
    with pytest.raises(CorpError, match="needs checkpoint=FILE"):
        timm.create_model("corp_pruned")


def test_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def download(name: str, file: str, revision: str | None, **_: Any) -> str:
        asked.append((name, file, revision))
        return str(folder / file)

    config = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("timm.models._hub.download_from_hf", lambda *_, **__: folder / "config.json")
    corp_cli.register()
    model: nn.Module = timm.create_model("hf-hub:me/pruned@v1", pretrained=True)
    assert config["architecture"] == "corp_pruned"
    assert asked == [("me/pruned", "model.safetensors", "v1")]
    x = variants.images("deit3_layer_scale")
    torch.testing.assert_close(logits(model.eval(), x), logits(load_pruned(folder / "model.safetensors"), x))


def test_fine_tuning_for_an_epoch_brings_accuracy_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["calibration.num_images=128", "evaluation.num_images=16", "evaluation.throughput_batches=0", "device=cpu"]
    cut = ["recipe=paper", "sparsity.joint=0.875", f"hydra.run.dir={tmp_path}"]
    assert main(["prune", *quick, *cut]) == 0
    script, tuned = ROOT / "scripts/finetune_digits.py", tmp_path / "tuned.safetensors"
    monkeypatch.setattr("sys.argv", ["finetune_digits.py", f"{tmp_path}/pruned.safetensors", "--out", str(tuned)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    capsys.readouterr()
    runpy.run_path(str(script), run_name="__main__")
    before, after = (float(found) for found in re.findall(r"top-1 ([\d.]+)%", capsys.readouterr().out))
    assert after > before + 2
    args = [f"checkpoint={tuned}", "model=vit_digits", "device=cpu", f"hydra.run.dir={tmp_path}/evaluation"]
    assert main(["evaluate", *args]) == 0
    found = json.loads((tmp_path / "evaluation/evaluation.json").read_text())
    assert found["results"]["model"]["top1"] == pytest.approx(after, abs=0.01)


@torch.no_grad()
def test_another_image_size_resizes_the_positions(tmp_path: Path) -> None:
    corp_cli.register()
    dense, (name, args) = variants.build("vit"), variants.arguments("vit")
    small, path = pruned("vit"), tmp_path / "pruned.safetensors"
    write_checkpoint(small, Manifest(ModelSpec(name, args, DATA), pruned_sizes(small, dense), {}, ""), path)
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found: Any = timm.create_model("corp_pruned", checkpoint=path, img_size=64)
    small.set_input_size(64)
    torch.testing.assert_close(logits(found, x), logits(small, x))
    assert found.pretrained_cfg["input_size"] == [3, 64, 64]
    attn = found.get_submodule("blocks.0.attn")
    assert (attn.head_dim, attn.fused_attn) == (attn.v_dim, True)
