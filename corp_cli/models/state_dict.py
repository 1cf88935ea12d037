"""State dicts from files as users have them: safetensors, or PyTorch files read without running a pickle."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from corp_cli.errors import CorpError

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model", "module")  # the first found is opened
PRUNED = "corp-pruned"  # marks, in a file's metadata, what corp.checkpoint has written
ZIP, PICKLE, LFS = b"PK\x03\x04", b"\x80", b"version https://"  # how files begin
WEIGHTS = ("model.safetensors", "*.safetensors", "pytorch_model.bin", "*.pth", "*.pt", "*.bin")  # in order of trust
PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, Lightning


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth, .pt or .bin file, unwrapped from nested keys and prefixes.

    PyTorch files are read with `weights_only=True`: tensors only, never code. Raises CorpError for anything else.
    """
    if path.is_dir():
        raise CorpError(f"model.checkpoint={path} is a folder; give the file in it that holds the weights.")
    if not path.is_file():
        raise CorpError(f"The checkpoint {path} does not exist; check model.checkpoint.")
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise CorpError(f"{path} cannot be read ({error.strerror}); check its permissions.") from error
    if not start:
        raise CorpError(f"{path} is empty; copy or download it again.")
    if start.startswith(LFS):
        raise CorpError(f"{path} is a Git LFS pointer, not the weights themselves; run git lfs pull.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path, start)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of pickle protocols before it refuses the pickle
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not start.startswith((ZIP, PICKLE)):
            raise CorpError(f"{path} is not a PyTorch checkpoint; copy or download it again.") from error
        raise CorpError(
            f"{path} holds Python objects besides tensors and is not opened, since that could run code; convert it "
            "where you trust it: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')."
        ) from error
    except Exception as error:
        whole = "whole " if start.startswith(ZIP) else ""
        raise CorpError(
            f"{path} is not a {whole}PyTorch checkpoint ({type(error).__name__}); copy or download it again."
        ) from error
    return _unwrap(content, path)


def weights_in(folder: Path) -> Path:
    """The file of weights in a folder of timm: those that cannot hold code first."""
    for pattern in WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found[0]
    raise CorpError(f"{folder} holds no weights ({', '.join(WEIGHTS)}); copy or download them again.")


def _read_safetensors(path: Path, start: bytes) -> dict[str, Tensor]:
    # A safetensors file begins with the length of its header, which may look like a pickle, and then "{".
    if start.startswith((ZIP, PICKLE)) and start[8:9] != b"{":
        raise CorpError(f"{path} is a PyTorch file by content, not safetensors; rename it to end in .pth.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CorpError(f"{path} is not a whole safetensors file ({error}); copy or download it again.") from error
    if PRUNED in metadata:
        raise CorpError(
            f"{path} is a model that corp has pruned already, and model.checkpoint takes dense weights; give the "
            "weights that it was made from. corp info checkpoint=FILE describes it."
        )
    return _unwrap(state, path)


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise CorpError(f"{path} holds a {type(content).__name__}, not a state dict of named tensors.")
    state = {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    for prefix in PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name[len(prefix) :]: tensor for name, tensor in state.items()}
    if not state:
        raise CorpError(f"{path} holds no tensors.")
    return state


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def fit_state_dict(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load `state` into `model`, strictly. Raises CorpError naming tensors missing, unexpected or of another shape."""
    own = model.state_dict()
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    shapes = [
        f"{name} {list(state[name].shape)} where {list(own[name].shape)} is needed"
        for name in sorted(own.keys() & state.keys())
        if own[name].shape != state[name].shape
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    found = [f"{len(names)} tensors {what} ({_few(names)})" for what, names in problems if names]
    if found:
        raise CorpError(
            f"{source} does not fit the model: {'; '.join(found)}. Check that model and model.args name the "
            "architecture that the checkpoint was made from."
        )
    model.load_state_dict(state)
