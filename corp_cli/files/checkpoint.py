"""pruned.safetensors: small real tensors, and a manifest from which the module is built again."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.files.tensors import save_whole
from corp_cli.models.loading import ModelSpec, empty_model, state_tensors
from corp_cli.models.resize import PrunedSizes, resize, sizes_from_json

FORMAT = "corp-pruned"
FORMAT_VERSION = 3  # 1 knew no blocks that update only some tokens, 2 none that merge any
READABLE = (1, 2, 3)


@dataclass(frozen=True)
class Manifest:
    """What a pruned checkpoint says of itself."""

    model: ModelSpec
    blocks: dict[str, PrunedSizes]  # those that differ from the dense model's
    recipe: dict[str, Any]
    dense_sha256: str  # of the dense weights it was made from
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """For the metadata of the file."""
        return json.dumps(asdict(self), sort_keys=True)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the state dict, in order of name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state_tensors(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def write_checkpoint(model: nn.Module, manifest: Manifest, path: Path) -> None:
    """Write tensors and manifest to `path`, which appears only when whole. Raises CorpError if it cannot be written."""
    try:
        save_whole(state_tensors(model), path, FORMAT, manifest.to_json())
    except (OSError, SafetensorError) as error:
        raise CorpError(f"{path} cannot be written ({error}); check space and permissions.") from error


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a pruned checkpoint. Raises CorpError for a file that is not one."""
    content = _read(Path(path), tensors=False)[0]
    if content.get("format_version") not in READABLE:
        raise CorpError(
            f"{path} has format version {content.get('format_version')}, and this corp reads {FORMAT_VERSION}; "
            "use the version of corp that wrote it, or a newer one."
        )
    blocks = {name: sizes_from_json(entry) for name, entry in content["blocks"].items()}
    return Manifest(**{**content, "model": ModelSpec(**content["model"]), "blocks": blocks})


def _read(path: Path, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise CorpError(f"The checkpoint {path} does not exist.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys()) if tensors else []
            state = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CorpError(f"{path} is not a whole safetensors file ({error}); copy or make it again.") from error
    if FORMAT not in metadata:
        raise CorpError(
            f"{path} was not written by corp prune: it holds no manifest. Dense weights go to model.checkpoint."
        )
    content: dict[str, Any] = json.loads(metadata[FORMAT])
    return content, state


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def load_pruned(path: str | os.PathLike[str]) -> nn.Module:
    """The pruned model in `path`, on the CPU, in eval mode; needs no dense weights, no network and no config.

    timm's resolve_model_data_config(model) answers with the preprocessing it was calibrated with.
    Raises CorpError for a file that is not a whole pruned checkpoint.
    """
    manifest = read_manifest(path)
    _, state = _read(Path(path))
    model = empty_model(manifest.model)
    resize(model, manifest.blocks)
    dtype = next(t.dtype for t in state.values() if t.is_floating_point())
    model.to(dtype)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CorpError(f"The tensors in {path} do not match its manifest; make it again.") from error
    return model.eval()
