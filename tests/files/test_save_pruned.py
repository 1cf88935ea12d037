"""save_pruned: a pruned module, also once it was trained, in one file that load_pruned and the commands read."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import corp_cli
from corp_cli import CorpError, load_config, load_pruned, prune, save_pruned
from corp_cli.cli import main as cli
from corp_cli.files.checkpoint import carried_manifest, carry_manifest
from corp_cli.files.manifest import read_manifest
from corp_cli.models.bundled import BUNDLED, BundledModel
from corp_cli.models.loaded import weights_sha256
from tests.support.variants import build, logits, require_same

X = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SETTINGS = ("recipe=paper", "calibration.num_images=32", "evaluation.num_images=16", "evaluation.throughput_batches=0")


@pytest.fixture(scope="module")
def run_folder(tiny_model: BundledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUNDLED, "vit_digits", tiny_model)
        prune(load_config("sparsity.joint=0.5", "device=cpu", *SETTINGS), folder)
    return folder


@pytest.fixture
def checkpoint(run_folder: Path, tiny_digits: object) -> Path:
    return run_folder / "pruned.safetensors"


def train(model: nn.Module) -> nn.Module:
    """One step."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    F.cross_entropy(model(X), torch.arange(8)).backward()
    optimiser.step()
    return model.eval()


def info(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `corp info` says of a file."""
    capsys.readouterr()
    assert cli.main(["info", f"checkpoint={path}"]) == 0
    return capsys.readouterr().out


def test_the_result_of_a_run_and_of_load_pruned_can_be_saved(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without training the file is the same, byte for byte."""
    save_pruned(load_pruned(checkpoint), tmp_path / "again" / "a.safetensors")
    assert (tmp_path / "again" / "a.safetensors").read_bytes() == checkpoint.read_bytes()
    result = prune(load_config("sparsity.joint=0.5", "device=cpu", *SETTINGS))
    save_pruned(result.model, tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == checkpoint.read_bytes()
    assert "trained" not in info(checkpoint, capsys)


def test_a_trained_model_is_saved_and_said_to_be(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = train(load_pruned(checkpoint)), tmp_path / "trained.safetensors"
    save_pruned(model, path)
    require_same(logits(load_pruned(path), X), logits(model, X))
    assert "weights        trained after pruning" in info(path, capsys)
    manifest, before = read_manifest(path), read_manifest(checkpoint)
    assert (manifest.trained, before.trained) == (True, False)
    assert manifest.pruned_sha256 == before.pruned_sha256 == weights_sha256(load_pruned(checkpoint))
    assert replace(manifest, trained=False) == before
    evaluate = ["evaluate", f"checkpoint={path}", "model=vit_digits", "evaluation.num_images=8", "device=cpu"]
    assert cli.main([*evaluate, "evaluation.throughput_batches=0", f"hydra.run.dir={tmp_path}/ev"]) == 0
    # read and written again, it is still what was trained
    save_pruned(load_pruned(path), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_training_the_weights_of_pruning_back_is_no_training(checkpoint: Path, tmp_path: Path) -> None:
    model = train(load_pruned(checkpoint))
    model.load_state_dict(load_pruned(checkpoint).state_dict())
    save_pruned(model, tmp_path / "back.safetensors")
    assert not read_manifest(tmp_path / "back.safetensors").trained


def test_an_export_in_other_floats_is_no_training(checkpoint: Path, tmp_path: Path) -> None:
    assert cli.main(["export", f"checkpoint={checkpoint}", "format=timm", "dtype=float16", *out(tmp_path)]) == 0
    assert not read_manifest(tmp_path / "export" / "timm" / "model.safetensors").trained
    save_pruned(train(load_pruned(checkpoint)), tmp_path / "trained.safetensors")
    argv = ["export", f"checkpoint={tmp_path}/trained.safetensors", "format=timm", "dtype=float16"]
    assert cli.main([*argv, *out(tmp_path)]) == 0
    assert read_manifest(tmp_path / "export" / "timm" / "model.safetensors").trained


def out(folder: Path) -> tuple[str, ...]:
    return f"hydra.run.dir={folder}/export", "evaluation.throughput_batches=0"


def test_files_of_older_versions_are_trained_too(checkpoint: Path, tmp_path: Path) -> None:
    """They say nothing of the weights of pruning: those that are read are taken for them."""
    model = load_pruned(checkpoint)
    manifest = carried_manifest(model)
    assert manifest is not None
    carry_manifest(model, replace(manifest, pruned_sha256=None))
    save_pruned(train(model), tmp_path / "trained.safetensors")
    assert read_manifest(tmp_path / "trained.safetensors").trained


@pytest.mark.parametrize(
    "copied",
    [
        deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.double().float(),
        nn.DataParallel,
        lambda model: nn.DataParallel(nn.DataParallel(model)),
        torch.compile,
    ],
)
def test_the_manifest_goes_where_the_module_goes(checkpoint: Path, tmp_path: Path, copied: Any) -> None:
    save_pruned(copied(load_pruned(checkpoint)), tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").read_bytes() == checkpoint.read_bytes()


def test_the_manifest_is_no_part_of_the_state(checkpoint: Path) -> None:
    model = load_pruned(checkpoint)
    model.load_state_dict(train(deepcopy(model)).state_dict())
    assert carried_manifest(model) == carried_manifest(load_pruned(checkpoint))
    assert not any("manifest" in name for name in model.state_dict())


def test_what_timm_makes_of_a_checkpoint_can_be_saved(checkpoint: Path, tmp_path: Path) -> None:
    corp_cli.register()
    model = timm.create_model("corp_pruned", checkpoint=checkpoint)
    save_pruned(model, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == checkpoint.read_bytes()


def test_a_new_classifier_is_saved_with_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = load_pruned(checkpoint)
    model.reset_classifier(3)
    save_pruned(model.eval(), tmp_path / "three.safetensors")
    loaded = load_pruned(tmp_path / "three.safetensors")
    assert logits(loaded, X).shape == (8, 3)
    require_same(logits(loaded, X), logits(model, X))
    assert "num_classes=3" in info(tmp_path / "three.safetensors", capsys)


def test_an_existing_file_is_replaced_or_stays(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "there.safetensors"
    path.write_text("something else")
    model = load_pruned(checkpoint)
    with monkeypatch.context() as broken:

        def full(*args: object, **how: object) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr("corp_cli.files.tensors.save_file", full)
        with pytest.raises(CorpError, match="cannot be written"):
            save_pruned(model, path)
    assert path.read_text() == "something else"
    save_pruned(model, path)
    assert path.read_bytes() == checkpoint.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["there.safetensors"]


def no_number(model: Any) -> Any:
    nn.init.constant_(model.head.bias, float("nan"))
    return model


def other_shape(model: Any) -> Any:
    model.blocks[0].mlp.fc2 = nn.Linear(8, 32)
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: build("vit"), "corp did not prune this VisionTransformer"),
        (lambda model: model.blocks, "corp did not prune this Sequential"),
        (lambda model: nn.Linear(2, 2), "corp did not prune this Linear"),
        (other_shape, r"no longer of the shape that corp gave it: .*blocks\.0\.mlp\.fc2\.weight \[32, 8\]"),
        (no_number, r"NaN or infinite values in head\.bias"),
    ],
)
def test_other_modules_are_refused(checkpoint: Path, tmp_path: Path, change: Any, said: str) -> None:
    with pytest.raises(CorpError, match=said):
        save_pruned(change(load_pruned(checkpoint)), tmp_path / "not.safetensors")
    assert not (tmp_path / "not.safetensors").exists()


def test_a_folder_is_no_file(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpError, match="cannot be written"):
        save_pruned(load_pruned(checkpoint), tmp_path)
