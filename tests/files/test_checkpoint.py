"""Checkpoints: what is written, what is refused, and dense weights as users have them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from corp_cli.commands import info
from corp_cli.config.checkpoints import InfoConfig
from corp_cli.config.images import CalibrationConfig, DataConfig, EvaluationConfig
from corp_cli.config.prune import ModelConfig, PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.files import tensors as tensor_files
from corp_cli.files.checkpoint import load_pruned, pruned_model, write_checkpoint
from corp_cli.files.manifest import FORMAT, read_manifest
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loading import load_dense
from corp_cli.models.preprocess import eval_transform
from corp_cli.models.spec import FORMAT_VERSION, Manifest
from corp_cli.models.state_dict import read_state_dict
from corp_cli.pipeline import prune
from tests.support.variants import logits, require_same


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    quick = EvaluationConfig(num_images=16, throughput_batches=0)
    cfg = PruneConfig(calibration=CalibrationConfig(num_images=64), evaluation=quick, device="cpu")
    prune(replace(cfg, sparsity=SparsityConfig(joint=0.5)), folder)
    return folder / "pruned.safetensors"


def test_manifest_says_how_to_build_the_model(checkpoint: Path) -> None:
    with safe_open(checkpoint, framework="pt") as file:
        manifest = json.loads(file.metadata()[FORMAT])
    assert manifest["format_version"] == FORMAT_VERSION
    assert manifest["model"]["name"] == "vit_tiny_patch16_224"
    assert manifest["model"]["args"]["embed_dim"] == 96
    assert manifest["blocks"]["blocks.3"]["attn"]["qk"] == 16
    assert manifest["blocks"]["blocks.3"]["attn"]["scale"] == pytest.approx(32**-0.5)
    assert manifest["recipe"]["recipe"] == "best"
    assert len(manifest["dense_sha256"]) == 64
    assert {"corp", "torch", "timm"} <= manifest["versions"].keys()


def test_file_is_readable_as_the_umask_says(checkpoint: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert checkpoint.stat().st_mode & 0o777 == 0o666 & ~umask


OWN = {
    "input_size": [1, 8, 8],
    "mean": [0.4],
    "std": [0.25],
    "interpolation": "bilinear",
    "crop_pct": 0.8,
    "crop_mode": "squash",
}


def test_timm_prepares_images_of_the_loaded_model_as_corp_did(checkpoint: Path, tmp_path: Path) -> None:
    """Whatever the timm entry says, which is of 224x224 in colour."""

    def mark(manifest: Any, tensors: object) -> None:
        manifest["model"]["data"] = OWN

    path = rewrite(checkpoint, tmp_path / "own.safetensors", mark)
    require_transform(load_pruned(path), read_manifest(path).model.data)
    assert read_manifest(path).model.data == OWN


@pytest.mark.usefixtures("tiny_digits")
def test_timm_prepares_images_as_the_run_and_the_command_line_said(checkpoint: Path) -> None:
    data = DataConfig(mean=[0.1], interpolation="nearest", crop_pct=0.5)
    changed = pruned_model(str(checkpoint), data)
    assert changed.spec.data["crop_pct"] == 0.5
    require_transform(changed.model, changed.spec.data)
    quick = EvaluationConfig(num_images=16, throughput_batches=0)
    calibration = CalibrationConfig(num_images=64, num_workers=0)
    cfg = PruneConfig(data=data, calibration=calibration, evaluation=quick, device="cpu")
    require_transform(prune(replace(cfg, sparsity=SparsityConfig(joint=0.5))).model, changed.spec.data)


def require_transform(model: Any, data: dict[str, Any]) -> None:
    """timm makes the same tensors for `model` as corp does of `data`."""
    noise = np.random.default_rng(0).integers(0, 256, (13, 10), dtype=np.uint8)
    image = Image.fromarray(noise)
    wanted = eval_transform(data)(image)
    assert wanted.shape == (1, 8, 8)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    torch.testing.assert_close(transform(image), wanted)


def test_the_loaded_model_says_what_is_its_own(checkpoint: Path) -> None:
    model: Any = load_pruned(checkpoint)
    for said in (model.pretrained_cfg, model.default_cfg):
        assert {**said, **BUNDLED["vit_digits"].data, "num_classes": 10} == said
        assert (said["architecture"], said["classifier"]) == ("vit_tiny_patch16_224", "head")
        assert not {"url", "hf_hub_id", "tag", "custom_load", "license"} & said.keys()  # of the weights of timm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_files_in_other_floats_are_evaluated(checkpoint: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    def cast(manifest: object, tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    path = rewrite(checkpoint, tmp_path / "cast.safetensors", cast)
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = logits(pruned_model(str(path)).model, x)
    wide = 1.0 if dtype.itemsize == 1 else 0.1
    torch.testing.assert_close(found, logits(load_pruned(checkpoint), x), rtol=wide, atol=wide)
    kept = torch.float32 if dtype.itemsize == 1 else dtype
    assert next(load_pruned(path).parameters()).dtype == kept


def test_values_that_are_none_are_named(checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(checkpoint, tmp_path / "nan.safetensors", lambda m, t: t["norm.bias"].fill_(float("nan")))
    with pytest.raises(CorpError, match=r"NaN or infinite values in norm\.bias"):
        pruned_model(str(path))


def test_info_describes_it(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info.run(InfoConfig(str(checkpoint)), tmp_path)
    assert not list(tmp_path.iterdir())
    out = capsys.readouterr().out
    assert "192 of 384" in out
    assert "396,202 of 674,410" in out


def test_info_imports_no_torch(checkpoint: Path, tmp_path: Path) -> None:
    """It reads a header; torch and timm alone would take seconds."""
    slow = "{'torch', 'timm', 'numpy', 'safetensors', 'scipy', 'PIL'} & sys.modules.keys()"
    code = f"import sys; from corp_cli.cli.main import main; sys.exit(main(sys.argv[1:]) or {slow} or 0)"
    command = [sys.executable, "-c", code, "info", f"checkpoint={checkpoint}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "396,202 of 674,410" in done.stdout


def older(version: int) -> Any:
    """What `version` of the format did not know yet, taken out."""

    def edit(manifest: dict[str, Any], tensors: object) -> None:
        manifest["format_version"] = version
        for key in [*(["pruned_sha256", "trained"] if version < 5 else []), *(["counts"] if version < 4 else [])]:
            del manifest[key]
        for sizes in manifest["blocks"].values():
            for key in ("folded", *("merge", "tokens")[: max(0, 3 - version)]):
                del sizes[key]

    return edit


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_files_of_older_versions_are_read(
    checkpoint: Path, tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewrite(checkpoint, tmp_path / "old.safetensors", older(version))
    manifest, new = read_manifest(path), read_manifest(checkpoint)
    assert (manifest.format_version, manifest.counts) == (version, new.counts if version >= 4 else None)
    assert (manifest.pruned_sha256, manifest.trained) == (new.pruned_sha256 if version == 5 else None, False)
    assert (manifest.model, manifest.blocks) == (new.model, new.blocks)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    require_same(logits(load_pruned(path), x), logits(load_pruned(checkpoint), x))
    info.run(InfoConfig(str(checkpoint)), Path())
    said = capsys.readouterr().out
    info.run(InfoConfig(str(path)), Path())
    assert capsys.readouterr().out == said


def test_what_the_file_says_of_its_shapes_is_so(checkpoint: Path, tmp_path: Path) -> None:
    counts, report = read_manifest(checkpoint).counts, json.loads((checkpoint.parent / "report.json").read_text())
    assert counts is not None
    for name, found in (("dense", counts.dense), ("pruned", counts.pruned)):
        size = report["size"][name]
        assert (found.parameters, found.macs) == (size["parameters"], size["macs"])
    assert sum(p.numel() for p in load_pruned(checkpoint).parameters()) == counts.pruned.parameters
    assert {name: asdict(sizes) for name, sizes in counts.blocks.items()} == {
        block["name"]: block["dense"] for block in report["blocks"]
    }
    # where the manifest is changed and written again, as by corp export with data.input_size
    manifest = read_manifest(checkpoint)
    data = {**manifest.model.data, "mean": [0.1]}
    write_checkpoint(
        load_pruned(checkpoint),
        replace(manifest, model=replace(manifest.model, data=data), counts=None),
        tmp_path / "again.safetensors",
    )
    assert read_manifest(tmp_path / "again.safetensors").counts == counts


def test_info_lists_blocks_in_the_order_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twelve = {"depth": 12, "embed_dim": 12, "num_heads": 1, "img_size": 16}
    dense, spec = load_dense(ModelConfig("vit_tiny_patch16_224", pretrained=False, args=twelve))
    write_checkpoint(dense, Manifest(spec, {}, {}, ""), tmp_path / "pruned.safetensors")
    info.run(InfoConfig(str(tmp_path / "pruned.safetensors")), Path())
    found = re.findall(r"blocks\.(\d+)", capsys.readouterr().out)
    assert found == [str(i) for i in range(12)]


def rewrite(checkpoint: Path, path: Path, edit: Any) -> Path:
    """A copy of the checkpoint whose manifest and tensors `edit` has changed."""
    with safe_open(checkpoint, framework="pt") as file:
        manifest, tensors = json.loads(file.metadata()[FORMAT]), load_file(checkpoint)
    edit(manifest, tensors)
    save_file(tensors, path, metadata={FORMAT: json.dumps(manifest)})
    return path


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda good, bad: bad.write_bytes(good.read_bytes()[:-1000]), "not a whole safetensors file"),
        (lambda good, bad: bad.write_bytes(b""), "not a whole safetensors file"),
        (lambda good, bad: save_file({"a": torch.zeros(1)}, bad), "was not written by corp prune"),
        (lambda good, bad: None, "does not exist"),
        (lambda good, bad: rewrite(good, bad, lambda m, t: m.update(format_version=99)), "format version 99"),
        (lambda good, bad: rewrite(good, bad, lambda m, t: t.pop("cls_token")), "do not match its manifest"),
    ],
)
def test_other_files_are_refused_in_a_sentence(checkpoint: Path, tmp_path: Path, damage: Any, sentence: str) -> None:
    path = tmp_path / "bad.safetensors"
    damage(checkpoint, path)
    with pytest.raises(CorpError, match=sentence):
        load_pruned(path)


def test_nothing_half_written_stays(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(CorpError, match="cannot be written"):
        write_checkpoint(load_pruned(checkpoint), read_manifest(checkpoint), tmp_path / "pruned.safetensors")
    assert list(tmp_path.iterdir()) == []


# --- dense weights --------------------------------------------------------------------------------------------

WEIGHTS = BUNDLED["vit_digits"].weights


@pytest.mark.parametrize("suffix", [".pth", ".bin", ".pt"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
        lambda state: {"model_ema": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}, "model": {}},
    ],
)
def test_pytorch_files_are_unwrapped(tmp_path: Path, suffix: str, wrap: Any) -> None:
    state = load_file(WEIGHTS)
    path = tmp_path / f"weights{suffix}"
    torch.save(wrap(state), path)
    read = read_state_dict(path)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


class Payload:
    """A pickled object that is not a tensor."""


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: torch.save({"model": Payload()}, path), "could run code; convert it"),
        (lambda path: torch.save([1, 2], path), "not a state dict"),
        (lambda path: torch.save({"epoch": 1}, path), "holds no tensors"),
        (lambda path: path.write_bytes(b"hello"), "is not a PyTorch checkpoint"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: None, "does not exist"),
    ],
)
def test_other_pytorch_files_are_refused_in_a_sentence(tmp_path: Path, damage: Any, sentence: str) -> None:
    path = tmp_path / "weights.pth"
    damage(path)
    with pytest.raises(CorpError, match=sentence):
        read_state_dict(path)


def dense_from(path: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, path)
    load_dense(ModelConfig("vit_digits", checkpoint=str(path)))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = load_file(WEIGHTS)
    state["extra"] = torch.zeros(1)
    state["cls_token"] = torch.zeros(1, 1, 5)
    del state["norm.weight"], state["norm.bias"]
    with pytest.raises(CorpError) as caught:
        dense_from(tmp_path / "w.safetensors", state)
    message = str(caught.value)
    assert "2 tensors missing (norm.bias, norm.weight)" in message
    assert "1 tensors unexpected (extra)" in message
    assert "cls_token [1, 1, 5] where [1, 1, 96] is needed" in message


def test_nan_weights_are_named(tmp_path: Path) -> None:
    state = load_file(WEIGHTS)
    state["blocks.2.mlp.fc1.bias"][3] = float("nan")
    with pytest.raises(CorpError, match=r"NaN or infinite values in blocks\.2\.mlp\.fc1\.bias"):
        dense_from(tmp_path / "w.safetensors", state)


@pytest.mark.parametrize(
    ("cfg", "sentence"),
    [
        (ModelConfig("deit_tinny_patch16_224"), "did you mean deit_tiny_patch16_224"),
        (ModelConfig("vit_digit"), "did you mean vit_digits"),
        (ModelConfig("vit_tiny_patch16_224", args={"nonsense": 1}), "cannot be built with model.args"),
        (ModelConfig("no-such-source:x"), "Unknown model source|cannot be built|cannot be fetched"),
    ],
)
def test_unknown_models_are_refused_with_the_nearest(cfg: ModelConfig, sentence: str) -> None:
    with pytest.raises(CorpError, match=sentence):
        load_dense(cfg)


def test_weights_out_of_reach_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("deit_tiny_patch16_224", "hf-hub:timm/deit_tiny_patch16_224.fb_in1k"):
        with pytest.raises(CorpError, match=r"model\.checkpoint=FILE.*HF_HOME"):
            load_dense(ModelConfig(name))


def test_random_weights_follow_the_seed() -> None:
    cfg = ModelConfig("vit_tiny_patch16_224", pretrained=False, args={"depth": 1, "img_size": 32})
    state = torch.random.get_rng_state()
    one, same, other = (load_dense(cfg, seed=seed)[0].get_parameter("blocks.0.mlp.fc1.weight") for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_models_for_other_channels() -> None:
    small: dict[str, Any] = {"depth": 1, "img_size": 32}
    _, grey = load_dense(ModelConfig("deit_tiny_patch16_224", pretrained=False, args={**small, "in_chans": 1}))
    assert grey.data["input_size"] == [1, 32, 32]
    assert grey.data["mean"] == [pytest.approx((0.485 + 0.456 + 0.406) / 3)]
    assert eval_transform(grey.data)(Image.new("RGB", (40, 40))).shape == (1, 32, 32)
    _, four = load_dense(ModelConfig("deit_tiny_patch16_224", pretrained=False, args={**small, "in_chans": 4}))
    with pytest.raises(CorpError, match="takes 4 channels, and corp reads images of 1 or 3"):
        eval_transform(four.data)
