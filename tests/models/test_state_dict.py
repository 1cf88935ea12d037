"""Checkpoints that are not what they seem, each refused in one sentence."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

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
        ("w.pth", lambda p: p.write_bytes(pickle.dumps({"a": Fraction(1)})), "could run code; convert it"),
        ("w.pkl", lambda p: p.write_bytes(pickle.dumps(Fraction(1))), "could run code; convert it"),
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


# --- as people have them --------------------------------------------------------------------------------------


def one(value: float) -> dict[str, torch.Tensor]:
    return {"cls_token": torch.full((1, 1, 2), value), "blocks.0.attn.qkv.weight": torch.zeros(6, 2)}


WRAPPED: dict[str, Any] = {
    **{key: {key: one(1), "epoch": 3} for key in ("model_state_dict", "ema", "net", "params", "weights", "module")},
    "deep": {"state": {"of": {"it": one(1)}}, "args": {"lr": 0.1}},
    "averaged before trained": {"model": one(0), "model_ema": one(1), "optimizer": {"exp_avg": one(0)}},
    "teacher before student": {"student": one(0), "teacher": one(1)},
    "beside an optimizer": {"net": one(1), "optimizer": {"state": {i: {"m": torch.zeros(2)} for i in range(9)}}},
    "swa": {"n_averaged": torch.tensor(3), **{f"module.{k}": v for k, v in one(1).items()}},
    "prefixes": {f"_orig_mod.module.backbone._orig_mod.{k}": v for k, v in one(1).items()},
    "others": {f"model.net.module.{k}": v for k, v in one(1).items()},
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_weights_are_found_where_scripts_keep_them(tmp_path: Path, wrapped: Any) -> None:
    torch.save(wrapped, tmp_path / "w.pth")
    state = read_state_dict(tmp_path / "w.pth")
    assert state.keys() == one(1).keys()
    assert state["cls_token"].tolist() == [[[1, 1]]]


def test_where_there_are_none_the_keys_are_named(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "history": {"loss": [1.0]}, "a": 1, "b": 2}, tmp_path / "w.pth")
    with pytest.raises(CorpError, match="holds no tensors; its keys are: a, b, epoch and 1 more"):
        read_state_dict(tmp_path / "w.pth")


def test_a_checkpoint_of_timms_own(tmp_path: Path) -> None:
    """What timm.utils.CheckpointSaver writes, with what training scripts add to it."""
    args = argparse.Namespace(lr=0.1, opt_betas=[0.9, 0.99], data_dir=tmp_path, amp=False, best=np.float32(81.5))
    content = {"epoch": 3, "arch": "vit", "args": args, "metric": np.float64(0.5), "state_dict": one(1)}
    torch.save(content, tmp_path / "w.pth")
    assert read_state_dict(tmp_path / "w.pth").keys() == one(1).keys()


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.canary,)


@pytest.mark.parametrize("hide", [lambda e: argparse.Namespace(x=e), lambda e: argparse.Namespace(x=[{"y": (e,)}])])
def test_a_harmless_object_may_hide_no_other(tmp_path: Path, hide: Callable[[Evil], Any]) -> None:
    canary = tmp_path / "canary"
    torch.save({"args": hide(Evil(canary)), "state_dict": one(1)}, tmp_path / "w.pth")
    with pytest.raises(CorpError, match="could run code"):
        read_state_dict(tmp_path / "w.pth")
    assert not canary.exists()
    torch.load(tmp_path / "w.pth", weights_only=False)
    assert canary.exists()


# --- tensors that are none ------------------------------------------------------------------------------------

NOT_PLAIN = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "without values": lambda: torch.empty(2, device="meta"),
    "larger than what the file holds": lambda: torch.zeros(1).expand(10**8),
    "of type torch.int8": lambda: torch.ones(2, dtype=torch.int8),
    "of type torch.bool": lambda: torch.ones(2, dtype=torch.bool),
    "of type torch.complex64": lambda: torch.ones(2, dtype=torch.complex64),
}


@pytest.mark.filterwarnings("ignore")  # of PyTorch, that quantised tensors are on their way out
@pytest.mark.parametrize("what", NOT_PLAIN)
def test_tensors_that_are_not_plain_are_named(tmp_path: Path, what: str) -> None:
    torch.save({"model": {**one(1), "head.weight": NOT_PLAIN[what]()}}, tmp_path / "w.pth")
    with pytest.raises(CorpError, match=f"the tensor head.weight is {what}"):
        read_state_dict(tmp_path / "w.pth")


def test_a_storage_without_a_file_behind_it(tmp_path: Path) -> None:
    class Claimed:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), 0, (10**9,), (1,), False, {})

    class Storage:
        def __reduce__(self) -> Any:
            return torch.storage.TypedStorage, (10**9,)

    torch.save({"a": Claimed()}, tmp_path / "w.pth")
    with pytest.raises(CorpError, match=r"larger than what the file holds|not a whole PyTorch"):
        read_state_dict(tmp_path / "w.pth")


def test_integers_where_floats_are_needed(tmp_path: Path) -> None:
    state = load_file(WEIGHTS)
    save_file({**state, "head.bias": state["head.bias"].long()}, tmp_path / "w.safetensors")
    with pytest.raises(CorpError, match=r"1 tensors of another type \(head.bias torch.int64 where torch.float32"):
        load_dense(ModelConfig("vit_digits", checkpoint=str(tmp_path / "w.safetensors")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_other_floats_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    state = load_file(WEIGHTS)
    save_file({name: tensor.to(dtype) for name, tensor in state.items()}, tmp_path / "w.safetensors")
    model, _ = load_dense(ModelConfig("vit_digits", checkpoint=str(tmp_path / "w.safetensors")))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name].to(dtype).float())


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(10**7)}, tmp_path / "good.pth")
    bomb = zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "good.pth") as good, bomb:
        for name in good.namelist():
            bomb.writestr(name, good.read(name))
    assert (tmp_path / "bomb.pth").stat().st_size < 10**5
    with pytest.raises(CorpError, match="unpacks to more bytes than it has"):
        read_state_dict(tmp_path / "bomb.pth")
