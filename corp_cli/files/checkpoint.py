"""pruned.safetensors: small real tensors, and a manifest from which the module is built again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from corp_cli.config.images import DataConfig
from corp_cli.errors import CorpError
from corp_cli.files.fetch import fetched
from corp_cli.files.manifest import FORMAT, read_manifest
from corp_cli.files.tensors import SHARD_BYTES, save_parts, stored
from corp_cli.models.adapter import blocks_of
from corp_cli.models.counts import counted
from corp_cli.models.live import unwrapped
from corp_cli.models.loaded import LoadedModel, weights_sha256
from corp_cli.models.loading import build, filled, parameters, require_finite, skeleton, state_tensors
from corp_cli.models.preprocess import put_own_cfg, with_overrides
from corp_cli.models.resize import resize
from corp_cli.models.spec import FORMAT_VERSION, Counts, Manifest, PrunedSizes
from corp_cli.models.state_dict import misfits

CARRIED = "corp_manifest"  # the attribute of a module that holds its manifest
MOST_CUT = 1000  # a dense model of more than so many times the parameters is not what a file was pruned from


def write_checkpoint(model: nn.Module, manifest: Manifest, path: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors and manifest to `path`, which appears only when whole; above `shard_bytes` in shards beside it.

    Raises CorpError if it cannot be written.
    """
    pruned, counts = manifest.pruned_sha256 or weights_sha256(model), manifest.counts or counts_of(manifest)
    manifest = replace(manifest, format_version=FORMAT_VERSION, counts=counts, pruned_sha256=pruned)
    try:
        save_parts(state_tensors(model), path, FORMAT, manifest.to_json(), shard_bytes)
    except (OSError, SafetensorError) as error:
        raise CorpError(f"{path} cannot be written ({error}); check space and permissions.") from error


def counts_of(manifest: Manifest) -> Counts:
    """What follows from the shapes of the model that `manifest` describes, dense and pruned."""
    model = skeleton(manifest.model)
    dense, blocks = counted(model, manifest.model), {block.name: block.sizes for block in blocks_of(model)}
    cut(model, manifest.blocks)
    return Counts(dense, counted(model, manifest.model), blocks)


def cut(model: nn.Module, sizes: dict[str, PrunedSizes]) -> None:
    """Give the blocks of a dense model the `sizes` that a file names. Raises ValueError for sizes it cannot have."""
    dense = {block.name: block.sizes for block in blocks_of(model)}
    for name, new in sizes.items():
        if name not in dense:
            raise ValueError(f"it has no block {name[:40]}")
        for group, units in new.units().items():
            if not 0 < units <= getattr(dense[name], group):
                raise ValueError(f"{name} cannot have {units} of {getattr(dense[name], group)} units of {group}")
    resize(model, sizes)


# --- the manifest that a module carries -----------------------------------------------------------------------


def carry_manifest(model: nn.Module, manifest: Manifest) -> Manifest:
    """Let `model` carry its manifest, with the hash of the weights as they are unless it has one → that manifest.

    A plain attribute: deepcopy, pickle, casts, moves and load_state_dict leave it alone, and no state dict holds it.
    """
    manifest = replace(manifest, pruned_sha256=manifest.pruned_sha256 or weights_sha256(model))
    setattr(model, CARRIED, manifest)
    return manifest


def carried_manifest(model: nn.Module) -> Manifest | None:
    """The manifest of a module that corp has pruned or loaded; None of any other."""
    found: Manifest | None = getattr(unwrapped(model), CARRIED, None)
    return found


def save_pruned(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module that corp pruned, perhaps trained since, to one file that load_pruned and the commands read.

    The file appears, or replaces another, only when whole. Weights that are not those of pruning count as trained, also
    where they were only cast. A classifier may have been replaced by timm's reset_classifier. Raises CorpError for a
    module that corp did not prune, that has changed its shape since or holds NaN, and where the file cannot be written.
    """
    inner: Any = unwrapped(model)
    manifest = carried_manifest(inner)
    if manifest is None:
        raise CorpError(
            f"corp did not prune this {type(inner).__name__}, so there is no manifest to save with it; save what "
            "prune_model, prune or load_pruned gave, or use torch.save."
        )
    spec = manifest.model
    spec = replace(spec, args={**spec.args, "num_classes": inner.num_classes})
    manifest = replace(manifest, model=spec, counts=None)  # which follow from it
    with building(path, manifest):
        plain = skeleton(manifest.model)
        cut(plain, manifest.blocks)
    if wrong := misfits(plain, inner.state_dict()):
        raise CorpError(f"The {type(inner).__name__} is no longer of the shape that corp gave it: {wrong}; undo that.")
    require_finite(inner)
    trained = manifest.trained or manifest.pruned_sha256 not in (None, weights_sha256(inner))
    write_checkpoint(inner, replace(manifest, trained=trained), Path(path))


@contextmanager
def building(path: str | os.PathLike[str], manifest: Manifest) -> Iterator[None]:
    """Raises CorpError where what `manifest` describes cannot be built, by this version of timm or any."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise CorpError(
            f"The model in {path} cannot be built ({first.rstrip('.')}); it needs the version of timm that it was "
            f"made with ({manifest.versions.get('timm', 'unknown')}), or has to be made again."
        ) from error


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def load_pruned(path: str | os.PathLike[str]) -> nn.Module:
    """The pruned model in `path`, on the CPU, in eval mode; needs no dense weights, no network and no config.

    `path` may be one that is in shards: pruned.safetensors.index.json beside them, with or without the .index.json.
    `path` may be hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION, which corp push made; that is fetched once.
    It carries its manifest, so that save_pruned can write it again once it was trained.
    timm's resolve_model_data_config(model) answers with the preprocessing it was calibrated with.
    Raises CorpError for a file that is not a whole pruned checkpoint, and for a hub that does not give it.
    """
    path = fetched(path)
    manifest = read_manifest(path)
    try:
        shapes = {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in stored(path)}
        dtype = next(tensor.dtype for _, tensor in stored(path) if tensor.is_floating_point())
    except (SafetensorError, OSError, ValueError, StopIteration) as error:
        raise CorpError(f"{path} is not a whole safetensors file ({error}); copy or make it again.") from error
    with building(path, manifest):
        model: Any = skeleton(manifest.model)
        dense_parameters = parameters(model)
        cut(model, manifest.blocks)
    held = sum(shape.numel() for shape, _ in shapes.values())
    expected = {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in model.state_dict().items()}
    if expected != shapes or dense_parameters > MOST_CUT * held:
        raise CorpError(f"The tensors in {path} do not match its manifest; make it again.")
    model.to(dtype if dtype.itemsize > 1 else torch.float32)  # nothing computes in 8 bits
    model = filled(model, lambda: resized(manifest))
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in stored(path):  # one at a time: there may be no room for all of them twice
            own[name].copy_(tensor)
    put_own_cfg(model, manifest.model.data)
    assert isinstance(model, nn.Module)
    carry_manifest(model, manifest)
    return model.eval()


def resized(manifest: Manifest) -> nn.Module:
    """What `manifest` describes, with random weights."""
    model = build(manifest.model.name, manifest.model.args)
    resize(model, manifest.blocks)
    return model


def difference_of(path: Path, model: nn.Module) -> str | None:
    """In words, how the tensors of a checkpoint differ from those of `model` in any bit; one is read at a time."""
    ours, seen = state_tensors(model), set()
    for name, tensor in stored(path):
        seen.add(name)
        if name in ours and not same_bits(ours[name], tensor):
            return f"the tensor {name}"
    others = sorted(ours.keys() ^ seen)
    return f"tensors {', '.join(others)} are in one of them only" if others else None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two CPU tensors are the same, NaN included."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


def pruned_model(path: str, data: DataConfig | None = None) -> LoadedModel:
    """The model in a pruned checkpoint; `data` overrides its preprocessing. Raises CorpError as `load_pruned` does."""
    file = fetched(path)
    manifest, model = read_manifest(file), load_pruned(file).float()  # images are float32, whatever the file holds
    require_finite(model)
    if data:
        spec = replace(manifest.model, data=with_overrides(manifest.model.data, data, model))
        manifest = replace(manifest, model=spec)
        put_own_cfg(model, spec.data)
    return LoadedModel(path, model, manifest.model, manifest)
