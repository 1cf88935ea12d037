"""State dicts from files as users have them: safetensors, or PyTorch files read without running a pickle."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.runtime.pickles import ZIP, defect, load_pickle

# Keys under which training scripts keep weights; of several with as many tensors, the first is taken.
NESTED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "teacher", "state_dict", "model")
PRUNED = "corp-pruned"  # marks, in a file's metadata, what corp.checkpoint has written
PICKLE, LFS = b"\x80", b"version https://"  # how files begin
WEIGHTS = ("model.safetensors", "*.safetensors", "pytorch_model.bin", "*.pth", "*.pt", "*.bin")  # in order of trust
# what DataParallel, torch.compile, Lightning and wrappers of the user's own put before every name
WRAPPERS = {"module", "_orig_mod", "_forward_module", "model", "ema_model", "timm_model", "backbone", "net"}
WRAPPERS |= {"network", "student", "teacher"}
COUNTER = "n_averaged"  # beside the weights of torch's AveragedModel
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*FLOATS, torch.int64, torch.int32)  # the integers are indices


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth, .pt or .bin file, unwrapped from nested keys and prefixes.

    Of PyTorch files, tensors and harmless objects are read, never code. Raises CorpError for anything else.
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
        content = load_pickle(path)
    except pickle.UnpicklingError as error:
        if not start.startswith((ZIP, PICKLE)):
            raise CorpError(f"{path} is not a PyTorch checkpoint; copy or download it again.") from error
        raise CorpError(
            f"{path} holds Python objects besides tensors and is not opened, since that could run code; convert it "
            "where you trust it: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')."
        ) from error
    except ValueError as error:
        raise CorpError(f"{path} is not a PyTorch checkpoint: {error}; copy or download it again.") from error
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
    """The mapping in `content` that holds most tensors, without the prefixes that all its names share."""
    if not isinstance(content, Mapping):
        raise CorpError(f"{path} holds a {type(content).__name__}, not a state dict of named tensors.")
    order = {key: i for i, key in enumerate(NESTED)}
    found = [({str(k): t for k, t in m.items() if isinstance(t, Tensor)}, key) for key, m in _mappings(content)]
    state, _ = min(found, key=lambda one: (-len(one[0]), order.get(one[1], len(order))))
    if not state:
        keys = _few(sorted(map(str, content))) or "none"
        raise CorpError(f"{path} holds no tensors; its keys are: {keys}. Give a file with the model's state dict.")
    state.pop(COUNTER, None)
    while (first := {name.partition(".")[0] for name in state}) <= WRAPPERS and len(first) == 1:
        state = {name.partition(".")[2]: tensor for name, tensor in state.items()}
    for name, tensor in state.items():
        if wrong := defect(tensor, path) or (None if tensor.dtype in DTYPES else f"of type {tensor.dtype}"):
            raise CorpError(f"{path}: the tensor {name[:80]} is {wrong}; corp reads plain tensors of floats.")
    return state


def _mappings(content: Mapping[Any, Any]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """(key, mapping) of `content` and all below it, each once, the outermost first."""
    waiting, seen = deque([("", content)]), {id(content)}
    while waiting:
        yield (one := waiting.popleft())
        for key, value in one[1].items():
            if isinstance(value, Mapping) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((str(key), value))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def misfits(model: nn.Module, state: dict[str, Tensor]) -> str:
    """In words, which tensors of `state` are missing, unexpected or of another kind for `model`; empty: none."""
    own = model.state_dict()
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    shapes = [
        f"{name} {list(state[name].shape)} where {list(own[name].shape)} is needed"
        for name in sorted(own.keys() & state.keys())
        if own[name].shape != state[name].shape
    ]
    types = [
        f"{name} {state[name].dtype} where {own[name].dtype} is needed"
        for name in sorted(own.keys() & state.keys())
        if own[name].is_floating_point() != state[name].is_floating_point()
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "of another type": types}
    return "; ".join(f"{len(names)} tensors {what} ({_few(names)})" for what, names in problems.items() if names)


def fit_state_dict(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load `state` into `model`, strictly. Raises CorpError naming tensors missing, unexpected or of another kind."""
    if found := misfits(model, state):
        raise CorpError(
            f"{source} does not fit the model: {found}. Check that model and model.args name the "
            "architecture that the checkpoint was made from."
        )
    model.load_state_dict(state)
