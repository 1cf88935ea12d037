"""Checkpoints that are too large for one file: written in shards, read as one, and refused where they are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import load_torch_model
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from corp_cli import load_pruned
from corp_cli.cli.main import main
from corp_cli.errors import CorpError
from corp_cli.export import write as export_stage
from corp_cli.files import tensors
from corp_cli.files.checkpoint import difference_of, write_checkpoint
from corp_cli.files.manifest import read_manifest
from corp_cli.files.output import clear_results
from corp_cli.files.shards import checkpoint_files
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest, ModelSpec
from tests.models.test_adapter import allowed, prune_half
from tests.support import variants
from tests.support.hub import serving, take_for_hub
from tests.support.typed import UNTIMED
from tests.support.variants import logits

SMALL = 60_000  # bytes, of 150 000 or so
DATA = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
DATA |= {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}


@pytest.fixture(scope="module", params=["vit", "dinov3_swiglu"])
def pruned(request: pytest.FixtureRequest) -> tuple[nn.Module, Manifest]:
    """A model with random weights and half of every group gone; of DINOv3, some buffers are computed."""
    dense = variants.build(request.param)
    model = prune_half(variants.build(request.param), variants.images(request.param), allowed(request.param)).eval()
    spec = ModelSpec(*variants.arguments(request.param), DATA)
    return model.bfloat16(), Manifest(spec, pruned_sizes(model, dense), {}, "")


@pytest.fixture
def sharded(pruned: tuple[nn.Module, Manifest], tmp_path: Path) -> Path:
    """That model in shards; the file itself is not there."""
    write_checkpoint(*pruned, tmp_path / "pruned.safetensors", SMALL)
    return tmp_path / "pruned.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_shards_are_read_as_one(sharded: Path, pruned: tuple[nn.Module, Manifest]) -> None:
    count = len(names(sharded.parent)) - 1
    assert count > 1
    numbered = [f"pruned-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert names(sharded.parent) == [*numbered, "pruned.safetensors.index.json"]
    assert all((sharded.parent / name).stat().st_size < SMALL + 10_000 for name in numbered)
    x = variants.images("vit").bfloat16()
    for path in (sharded, Path(f"{sharded}.index.json")):
        model = load_pruned(path)
        assert difference_of(path, model) is None
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert torch.equal(logits(model, x), logits(pruned[0], x))
        assert main(["info", f"checkpoint={path}"]) == 0
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert str(difference_of(sharded, model)).startswith("the tensor ")


def test_others_read_them(pruned: tuple[nn.Module, Manifest], tmp_path: Path) -> None:
    write_checkpoint(*pruned, tmp_path / "model.safetensors", SMALL)
    model = load_pruned(tmp_path / "model.safetensors")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    load_torch_model(model, tmp_path)
    assert difference_of(tmp_path / "model.safetensors", model) is None


def without(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def of_others(path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without, r"-of-0000\d.safetensors is missing, which pruned.safetensors.index.json names; copy it to there"),
        (cut_short, r"-of-0000\d.safetensors is not a whole safetensors file \(its tensors are cut short\)"),
        (of_others, r"is not of the checkpoint that pruned.safetensors.index.json describes; copy or make"),
    ],
)
def test_a_shard_that_is_not_there_or_not_whole_is_named(
    sharded: Path, damage: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint_files(sharded)[1])
    for read in (load_pruned, read_manifest):
        with pytest.raises(CorpError, match=said):
            read(sharded)
    assert main(["info", f"checkpoint={sharded}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index["weight_map"].update({"head.bias": "../model-00001-of-00001.safetensors"}),
        lambda index: index["weight_map"].update({"head.bias": 3}),
        lambda index: index.update(weight_map={}),
        lambda index: index.update(weight_map=[]),
        lambda index: index.pop("metadata"),
    ],
)
def test_an_index_leads_nowhere_else(sharded: Path, damage: Callable[[Any], None]) -> None:
    path = Path(f"{sharded}.index.json")
    index = json.loads(path.read_text())
    damage(index)
    path.write_text(json.dumps(index))
    for read in (load_pruned, read_manifest):
        with pytest.raises(CorpError, match=r"is not the index of a checkpoint \("):
            read(sharded)


def test_one_takes_the_place_of_the_other(pruned: tuple[nn.Module, Manifest], sharded: Path) -> None:
    write_checkpoint(*pruned, sharded)
    assert names(sharded.parent) == [sharded.name]
    write_checkpoint(*pruned, sharded, SMALL)
    more = names(sharded.parent)
    write_checkpoint(*pruned, sharded, SMALL // 10)
    assert len(names(sharded.parent)) > len(more)
    assert not set(names(sharded.parent)) & set(more[:-1])
    load_pruned(sharded)
    clear_results(sharded.parent)
    assert names(sharded.parent) == []


def test_a_write_that_fails_leaves_nothing(
    pruned: tuple[nn.Module, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def full(content: Any, path: Path, *rest: Any) -> None:
        if written:
            raise SafetensorError("No space left on device")
        written.append(path)
        save_whole(content, path, *rest)

    save_whole = tensors.save_whole
    monkeypatch.setattr(tensors, "save_whole", full)
    with pytest.raises(CorpError, match="cannot be written"):
        write_checkpoint(*pruned, tmp_path / "pruned.safetensors", SMALL)
    assert len(written) == 1
    assert names(tmp_path) == []


@pytest.mark.usefixtures("empty_folder", "tiny_digits")
def test_commands_take_shards(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that writes them, and what is done with them afterwards, as on the hub."""
    monkeypatch.setattr(export_stage, "write_checkpoint", partial(write_checkpoint, shard_bytes=30_000))
    monkeypatch.setattr(export_stage, "load_pruned", None)  # there is no room for a second one
    quick = [*UNTIMED, "recipe=paper", "sparsity.joint=0.5"]
    assert main(["prune", *quick, "hydra.run.dir=here"]) == 0
    assert not Path("here/pruned.safetensors").exists()
    place = "checkpoint=here/pruned.safetensors"
    judge = ["evaluation.num_images=16", "evaluation.num_workers=0", "evaluation.throughput_batches=0", "device=cpu"]
    assert main(["evaluate", "model=vit_digits", place, *judge, "hydra.run.dir=judged"]) == 0
    capsys.readouterr()
    assert main(["push", "me/pruned", place, "folder=card", "--dry-run"]) == 0
    assert "model-00001-of-0000" in capsys.readouterr().out
    assert main(["push", "me/pruned", place, "folder=card", "--dry-run"]) == 0  # over what it wrote before
    assert "model.safetensors" not in names(Path("card"))
    with serving() as hub:
        take_for_hub(hub.endpoint, Path("cache").absolute(), monkeypatch)
        hub.files = {f"me/pruned/main/{path.name}": path.read_bytes() for path in Path("card").iterdir()}
        assert difference_of(Path("here/pruned.safetensors"), load_pruned("hf-hub:me/pruned")) is None
