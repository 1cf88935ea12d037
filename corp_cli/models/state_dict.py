"""State dicts from files as users have them: safetensors, or PyTorch files read without running a pickle."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from corp_cli.errors import CorpError

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model", "module")  # the first found is opened
PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, Lightning


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth, .pt or .bin file, unwrapped from nested keys and prefixes.

    PyTorch files are read with `weights_only=True`: tensors only, never code. Raises CorpError for anything else.
    """
    if not path.is_file():
        raise CorpError(f"The checkpoint {path} does not exist; check model.checkpoint.")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CorpError(f"{path} is not a whole safetensors file ({error}); copy or download it again.") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorpError(
            f"{path} holds Python objects besides tensors and is not opened, since that could run code; convert it "
            "where you trust it: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')."
        ) from error
    except Exception as error:
        raise CorpError(
            f"{path} is not a PyTorch checkpoint ({type(error).__name__}); copy or download it again."
        ) from error
    return _unwrap(content, path)


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
