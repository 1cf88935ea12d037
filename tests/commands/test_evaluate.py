"""`corp evaluate`: what it measures of which model, what it writes, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from corp_cli.cli.main import main
from corp_cli.models.bundled import BUNDLED, BundledModel

QUICK = ["device=cpu", "evaluation.num_workers=0", "evaluation.num_images=64"]


@pytest.fixture
def checkpoint(tiny_run: Path, tiny_digits: BundledModel) -> Path:
    return tiny_run / "pruned.safetensors"


def evaluate(folder: Path, *args: str) -> dict[str, Any]:
    assert main(["evaluate", *QUICK, *args, f"hydra.run.dir={folder}"]) == 0
    content: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return content


def test_against_the_reference(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are those that the run reported of the same images."""
    found = evaluate(tmp_path, f"checkpoint={checkpoint}", "model=vit_digits")
    report = json.loads((checkpoint.parent / "report.json").read_text())
    assert found["images"]["list_sha256"] == report["evaluation"]["list_sha256"]
    assert found["results"]["model"] == report["evaluation"]["pruned"]
    assert found["results"]["reference"] == report["evaluation"]["dense"]
    assert found["model"]["dense_sha256"] == found["reference"]["sha256"] == report["model"]["dense_sha256"]
    assert found["model"]["macs"] == report["size"]["pruned"]["macs"]
    assert found["warnings"] == []
    out = capsys.readouterr().out
    assert "KL to reference" in out
    assert "64 of them labelled" in out


def test_per_class(checkpoint: Path, tmp_path: Path) -> None:
    found = evaluate(tmp_path, f"checkpoint={checkpoint}", "model=vit_digits")
    with (tmp_path / "per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["class", "images", "top1", "top5"]
    assert [int(row["class"]) for row in rows] == list(range(10))
    hits = sum(int(row["images"]) * float(row["top1"]) for row in rows)
    assert sum(int(row["images"]) for row in rows) == 64
    assert hits / 64 == pytest.approx(found["results"]["model"]["top1"], rel=1e-4)


def test_dense_model_alone(tmp_path: Path) -> None:
    found = evaluate(tmp_path, "model=vit_digits", "evaluation.num_images=200", "evaluation.throughput_batches=1")
    assert found["reference"] is None
    assert found["results"]["reference"] is None
    assert found["results"]["model"]["kl"] is None
    assert found["results"]["model"]["top1"] >= 97
    assert found["throughput"]["images_per_second"]["model"] > 0


def test_random_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    tiny = [
        "model.name=vit_tiny_patch16_224",
        "model.pretrained=false",
        "+model.args={depth:1,img_size:8,patch_size:4}",
    ]
    argv = [
        *tiny,
        "+model.args.in_chans=1",
        "+model.args.num_classes=10",
        f"evaluation.path={BUNDLED['vit_digits'].evaluation}",
    ]
    found = [evaluate(tmp_path / str(turn), *argv, f"seed={seed}") for turn, seed in enumerate((1, 1, 2))]
    first, again, other = (one["results"]["model"]["top1"] for one in found)
    assert first == again != other


def test_checkpoint_alone_needs_images(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", f"checkpoint={checkpoint}", "device=cpu", f"hydra.run.dir={tmp_path}/out"]) == 2
    assert "set evaluation.path" in capsys.readouterr().err
    found = evaluate(tmp_path, f"checkpoint={checkpoint}", f"evaluation.path={BUNDLED['vit_digits'].evaluation}")
    assert found["results"]["model"]["top1"] >= 50
    assert found["results"]["model"]["agreement"] is None


def test_unlabelled_images(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(20):
        Image.new("L", (8, 8), 10 * i).save(photos / f"{i}.png")
    args = [f"checkpoint={checkpoint}", f"evaluation.path={photos}", "device=cpu"]
    assert main(["evaluate", *args, f"hydra.run.dir={tmp_path}/none"]) == 2
    assert "There is nothing to measure" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    found = evaluate(tmp_path / "some", *args, "model=vit_digits")
    assert found["results"]["model"]["top1"] is None
    assert found["results"]["model"]["agreement"] is not None
    assert not (tmp_path / "some/per_class.csv").exists()


def test_other_weights_as_reference_are_said_aloud(checkpoint: Path, tmp_path: Path) -> None:
    state = load_file(BUNDLED["vit_digits"].weights)
    save_file({name: tensor + 0.001 for name, tensor in state.items()}, tmp_path / "other.safetensors")
    found = evaluate(
        tmp_path, f"checkpoint={checkpoint}", "model=vit_digits", f"model.checkpoint={tmp_path}/other.safetensors"
    )
    assert any("has other weights than the dense model" in warning for warning in found["warnings"])


def test_reference_of_another_shape_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["model.name=vit_tiny_patch16_224", "model.pretrained=false", f"hydra.run.dir={tmp_path}/out"]
    assert main(["evaluate", "device=cpu", f"checkpoint={checkpoint}", *args]) == 2
    assert "so they cannot be compared" in capsys.readouterr().err


def test_the_same_twice_but_for_times(checkpoint: Path, tmp_path: Path) -> None:
    first, second = (evaluate(tmp_path / name, f"checkpoint={checkpoint}", "model=vit_digits") for name in "ab")
    for content in (first, second):
        del content["stage_seconds"], content["peak_memory_mib"]
    assert first == second


def test_preprocessing_can_be_set(checkpoint: Path, tmp_path: Path) -> None:
    found = evaluate(tmp_path, f"checkpoint={checkpoint}", "model=vit_digits", "data.mean=[0.4]")
    assert found["model"]["data"]["mean"] == [0.4]
    assert found["reference"]["data"]["mean"] == [0.4]
    assert torch.get_num_threads() == found["environment"]["torch_threads"]
