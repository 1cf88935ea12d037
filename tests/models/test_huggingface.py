"""Models of Hugging Face transformers: rewritten as timm's, they compute the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from corp_cli.cli.main import main
from corp_cli.config.prune import ModelConfig
from corp_cli.errors import CorpError
from corp_cli.models.huggingface import DEFAULTS, filled
from corp_cli.models.image_processors import image_data
from corp_cli.models.loading import load_dense
from corp_cli.models.preprocess import eval_transform

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
HIDDEN = {"intermediate_size": 64}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**HIDDEN, "num_labels": 5}),
    "vit_backbone": ("ViTModel", "ViTConfig", HIDDEN),
    "vit_no_bias": ("ViTForImageClassification", "ViTConfig", {**HIDDEN, "num_labels": 5, "qkv_bias": False}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**HIDDEN, "num_labels": 5}),
    "deit_teacher": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {**HIDDEN, "num_labels": 5}),
    "dinov2": ("Dinov2Model", "Dinov2Config", {}),
    "dinov2_swiglu": ("Dinov2Model", "Dinov2Config", {"use_swiglu_ffn": True}),
    "dinov2_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {}),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", HIDDEN),
}


def build(name: str) -> nn.Module:
    """A random model with weights large enough that every part of it matters."""
    torch.manual_seed(0)
    kind, config, extra = MODELS[name]
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**SMALL, **extra))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def output(model: nn.Module, x: Tensor) -> Tensor:
    """Logits, or the features that timm's head would give."""
    found = model(pixel_values=x)
    if hasattr(found, "logits"):
        return found.logits
    pooled: bool = type(model).__name__.startswith("Siglip")
    return found.pooler_output if pooled else found.last_hidden_state[:, 0]


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path]:
    model = build(request.param)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    return model, tmp_path / "model"


@pytest.mark.parametrize("saved", MODELS, indirect=True)
def test_the_rewritten_model_computes_the_same(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    found, spec = load_dense(ModelConfig(f"transformers:{folder}"))
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(found(x), output(model, x), rtol=1e-4, atol=1e-4)
    assert spec.data["input_size"] == [3, 32, 32]
    json.dumps(asdict(spec))


@pytest.mark.parametrize("name", ["vit", "dinov2_swiglu"])
def test_names_as_in_memory_are_understood_too(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.config.save_pretrained(tmp_path)  # type: ignore[union-attr,operator]
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    found, _ = load_dense(ModelConfig(f"transformers:{tmp_path}"))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(found(x), output(model, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("saved", ["vit"], indirect=True)
def test_pruned_as_typed_and_loaded_with_corp_alone(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    _, folder = saved
    processor = {
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
        "resample": 3,
        "size": {"height": 32, "width": 32},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    save_file({"images": torch.rand(40, 3, 32, 32)}, tmp_path / "images.safetensors")
    run = [
        f"model.name=transformers:{folder}",
        f"calibration.path={tmp_path}/images.safetensors",
        "calibration.num_images=32",
        "calibration.num_workers=0",
        "evaluation.num_workers=0",
        "evaluation.throughput_batches=0",
        f"hydra.run.dir={tmp_path}/out",
        "sparsity.joint=0.5",
        "device=cpu",
    ]
    assert main(["prune", *run]) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["model"]["timm_name"] == "vit_base_patch16_224"
    assert report["model"]["data"]["mean"] == [0.5, 0.5, 0.5]
    assert report["model"]["data"]["crop_mode"] == "squash"
    assert main(["info", f"checkpoint={tmp_path}/out/pruned.safetensors"]) == 0


@pytest.mark.parametrize("saved", ["vit"], indirect=True)
def test_what_cannot_be_read_says_why(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())

    def refused(sentence: str, **changed: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(CorpError, match=sentence):
            load_dense(ModelConfig(f"transformers:{folder}"))

    refused("is a swin with a classifier model; of transformers, corp reads vit, deit", model_type="swin")
    refused("uses selu, for which there is no counterpart in timm", hidden_act="selu")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "vit.extra.weight": torch.zeros(1)}, folder / "model.safetensors")
    refused("The weights hold vit.extra.weight, which is no part of a ViT")
    (folder / "model.safetensors").unlink()
    refused("leads to no weights")
    (folder / "config.json").unlink()
    with pytest.raises(CorpError, match=r"leads to no config\.json"):
        load_dense(ModelConfig(f"transformers:{folder}"))
    with pytest.raises(CorpError, match=r"there is no folder \./nowhere; give a folder, or owner/name on the hub"):
        load_dense(ModelConfig("transformers:./nowhere"))
    with pytest.raises(CorpError, match=r"leave out model\.checkpoint"):
        load_dense(ModelConfig(f"transformers:{folder}", checkpoint="x.safetensors"))


def test_a_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CorpError, match=r"cannot be fetched .*; without a network, download the repository elsewhere"):
        load_dense(ModelConfig("transformers:someone/some-model-that-is-not-there"))


# --- preprocessing --------------------------------------------------------------------------------------------

PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {}),
    "vit_384": ("ViT", {"size": {"height": 384, "width": 384}, "resample": 3}),
    "deit": ("DeiT", {}),
    "deit_odd": ("DeiT", {"size": {"height": 250, "width": 250}, "crop_size": {"height": 224, "width": 224}}),
    "siglip": ("Siglip", {}),
    "bit": ("Bit", {}),
    "bit_256": ("Bit", {"size": {"shortest_edge": 256}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.1]}),
    "not_normalised": ("ViT", {"do_normalize": False}),
    "other_factor": ("ViT", {"rescale_factor": 1 / 127.5}),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_are_prepared_as_the_image_processor_does(name: str, tmp_path: Path) -> None:
    kind, changed = PROCESSORS[name]
    processor = getattr(transformers, f"{kind}ImageProcessor")(**changed)
    processor.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((420, 300), Image.Resampling.BICUBIC)
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    said = json.loads((tmp_path / "preprocessor_config.json").read_text())
    for given in (said, {"image_processor_type": said["image_processor_type"], **changed}):
        config = {"image_size": expected.shape[-1], "num_channels": 3, "model_type": "vit"}
        found = eval_transform(image_data(given, config, name))(image)
        assert (found - expected).abs().mean() < 0.01 * expected.std()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"do_resize": False}, "do_resize=false"),
        ({"do_rescale": False}, "do_rescale=false"),
        ({"size": {"shortest_edge": 224}}, "shortest_edge without a square crop"),
        ({"size": {"height": 384, "width": 384}}, "images of 384x384, and the model takes 224x224"),
        ({"size": {"longest_edge": 224}}, "height"),
        ({"do_center_crop": True, "crop_size": 224, "size": 200}, "a crop of 224x224 out of 200x200"),
        ({"image_processor_type": "OwlViTImageProcessor"}, "it uses OwlViT"),
        ({"resample": 9}, "9"),
    ],
)
def test_what_timm_cannot_prepare_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CorpError, match=rf"asks what corp cannot do \(.*{said}"):
        image_data(given, {"image_size": 224, "num_channels": 3, "model_type": "vit"}, "x")


# --- folders --------------------------------------------------------------------------------------------------


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    for kind in ("ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "SiglipVision"):
        default = getattr(transformers, f"{kind}Config")()
        found = filled({"model_type": default.model_type})
        for key in DEFAULTS:
            assert found[key] == getattr(default, key), (kind, key)
    assert filled({"model_type": "siglip", "vision_config": {}}) == filled({"model_type": "siglip_vision_model"})


@pytest.mark.parametrize("saved", ["vit"], indirect=True)
def test_a_folder_in_shards(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    save_file({"junk": torch.zeros(1)}, folder / "other.safetensors")
    found, _ = load_dense(ModelConfig(f"transformers:{folder}"))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(found(x), output(model, x), rtol=1e-4, atol=1e-4)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CorpError, match=f"lacks {shard.name}, which its index names"):
        load_dense(ModelConfig(f"transformers:{folder}"))


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 10**5, '{"vision_config": 3}'])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CorpError, match=r"config\.json"):
        load_dense(ModelConfig(f"transformers:{tmp_path}"))


@pytest.mark.parametrize("saved", ["vit"], indirect=True)
@pytest.mark.parametrize("changed", [{"image_size": "x"}, {"num_hidden_layers": None}, {"hidden_act": []}])
def test_configs_of_other_types_are_refused(saved: tuple[nn.Module, Path], changed: dict[str, Any]) -> None:
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CorpError):
        load_dense(ModelConfig(f"transformers:{folder}"))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CorpError):
        load_dense(ModelConfig(f"transformers:{folder}"))
