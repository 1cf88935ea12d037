"""Checkpoints that are not what they seem, each refused in one sentence."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from corp_cli.config.prune import ModelConfig
from corp_cli.errors import CorpError
from corp_cli.files.manifest import FORMAT
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loading import load_dense
from corp_cli.models.state_dict import PRUNED, read_state_dict

WEIGHTS = BUNDLED["vit_digits"].weights


def test_the_mark_of_pruned_files_is_that_of_the_writer() -> None:
    assert PRUNED == FORMAT


def pruned(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path, metadata={FORMAT: "{}"})


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("w.safetensors", pruned, "pruned already.*takes dense weights"),
        ("w.safetensors", lambda p: p.write_bytes(b""), "is empty"),
        ("w.pth", lambda p: p.write_bytes(b""), "is empty"),
        ("w.safetensors", lambda p: p.write_bytes(WEIGHTS.read_bytes()[:-100]), "not a whole safetensors file"),
        ("w.safetensors", lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        ("w.safetensors", lambda p: torch.save({"a": torch.zeros(1)}, p), "PyTorch file by content.*rename"),
        ("w.safetensors", lambda p: p.mkdir(), "is a folder"),
        ("w.pth", lambda p: p.write_bytes(pickle.dumps({"a": Path("x")})), "could run code; convert it"),
        ("w.pkl", lambda p: p.write_bytes(pickle.dumps(Path("x"))), "could run code; convert it"),
        ("w.pth", lambda p: p.write_bytes(b"<html>not found</html>"), "is not a PyTorch checkpoint"),
        ("w.pth", lambda p: p.write_bytes(b"PK\x03\x04 cut short"), "is not a whole PyTorch checkpoint"),
    ],
)
def test_files_that_are_not_dense_weights(
    tmp_path: Path, name: str, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(tmp_path / name)
    with pytest.raises(CorpError, match=sentence):
        read_state_dict(tmp_path / name)


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(b"x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))  # tests may run as root, whom no mode stops

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorpError, match=r"cannot be read \(Permission denied\)"):
        read_state_dict(path)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "w.safetensors").write_bytes(WEIGHTS.read_bytes())
    load_dense(ModelConfig("vit_digits", checkpoint="~/w.safetensors"))
