"""Kept files: what was written comes back, and what was changed in any way does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from corp_cli.files.kept import FORMAT, DamagedError, ForeignError, Kept, read_kept, write_kept

KEPT = Kept({"weights": "a"}, {"good": 3}, {"x": torch.arange(6.0).reshape(2, 3), "none": torch.zeros(0)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_kept(tmp_path / "kept.safetensors", "block", KEPT)
    return tmp_path / "kept.safetensors"


def test_what_was_kept_comes_back(path: Path) -> None:
    found = read_kept(path, "block")
    assert (found.key, found.content) == (KEPT.key, KEPT.content)
    assert found.tensors.keys() == KEPT.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in KEPT.tensors.items())


def rewritten(path: Path, **changes: object) -> None:
    with safe_open(path, framework="pt") as file:
        head, tensors = json.loads(file.metadata()[FORMAT]), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    cast = changes.pop("cast", None)
    if isinstance(cast, torch.dtype):
        tensors = {name: tensor.to(cast) for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={FORMAT: json.dumps({**head, **changes})})


@pytest.mark.parametrize(
    "change",
    [
        {"cast": torch.float16},
        {"key": {"weights": "b"}},
        {"content": {"good": 4}},
        {"checksum": "0"},
        {"checksum": None},
        {"version": 0},
        {"kind": "curves"},
    ],
)
def test_any_change_is_seen(path: Path, change: dict[str, object]) -> None:
    rewritten(path, **change)
    with pytest.raises(DamagedError, match=r"was changed after it was written|another version of corp"):
        read_kept(path, "block")


def test_a_flipped_bit_is_seen(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="was changed"):
        read_kept(path, "block")


@pytest.mark.parametrize("content", [b"", b"{}", b"\x08\0\0\0\0\0\0\0{}      "])
def test_files_of_others_are_foreign(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ForeignError, match="is not a whole file of corp's"):
        read_kept(tmp_path / "x", "block")
    save_file({"x": torch.zeros(1)}, tmp_path / "x")
    with pytest.raises(ForeignError):
        read_kept(tmp_path / "x", "block")
