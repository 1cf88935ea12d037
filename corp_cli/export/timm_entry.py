"""Pruned models for timm.create_model: an entry in timm's registry, and the config.json of a folder that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import is_model, register_model
from torch import nn

from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import carry_manifest, load_pruned
from corp_cli.files.fetch import WEIGHTS, from_hub
from corp_cli.files.manifest import read_manifest
from corp_cli.files.output import write_json
from corp_cli.models.loading import build
from corp_cli.models.preprocess import put_own_cfg
from corp_cli.models.resize import resize
from corp_cli.models.spec import ModelSpec

NAME = "corp_pruned"


def register() -> None:
    """Let timm.create_model build pruned models: hf-hub:OWNER/NAME and local-dir:FOLDER, of a folder `timm`.

    timm.create_model("corp_pruned", checkpoint=FILE) takes a pruned.safetensors as it is.
    """
    if not is_model(NAME):
        register_model(corp_pruned)


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def corp_pruned(
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    pretrained_cfg: dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """What timm calls. `num_classes` gives a new head, `img_size` resizes the positions.

    Other `kwargs` go to the dense architecture.
    """
    for key in ("pretrained_cfg_overlay", "pretrained_model_args"):
        kwargs.pop(key, None)
    path = checkpoint or _weights(pretrained_cfg or {}, cache_dir)
    weights, manifest = load_pruned(path).state_dict(), read_manifest(path)
    model: Any = build(manifest.model.name, {**manifest.model.args, **kwargs})
    resize(model, manifest.blocks)
    if pretrained or checkpoint:
        model.load_state_dict(weights)
        carry_manifest(model, manifest)
    data = manifest.model.data
    if img_size is not None:
        if not hasattr(model, "set_input_size"):
            raise CorpError(
                f"img_size={img_size} does not suit {manifest.model.name}, whose size is fixed; leave it out."
            )
        model.set_input_size(img_size)
        size = [img_size] * 2 if isinstance(img_size, int) else list(img_size)
        data = {**data, "input_size": [data["input_size"][0], *size]}
    if num_classes is not None and num_classes != model.num_classes:
        model.reset_classifier(num_classes)
    put_own_cfg(model, data)
    assert isinstance(model, nn.Module)
    return model


def _weights(source: dict[str, Any], cache_dir: str | Path | None) -> Path:
    """The file behind timm's `source`, fetched from the hub if it lies there."""
    if source.get("file"):
        return Path(source["file"], WEIGHTS)
    if source.get("hf_hub_id"):
        name, _, revision = source["hf_hub_id"].partition("@")
        return from_hub(name, revision or None, cache_dir)
    raise CorpError(f"timm.create_model('{NAME}') needs checkpoint=FILE, a pruned.safetensors.")


def write_config(spec: ModelSpec, folder: Path) -> None:
    """Write the config.json by which timm knows a folder with a pruned model."""
    classes = spec.args["num_classes"]
    about = {**spec.data, "num_classes": classes}
    write_json({"architecture": NAME, "num_classes": classes, "pretrained_cfg": about}, folder / "config.json")


def create(folder: Path) -> nn.Module:
    """The model that timm builds from `folder`, in eval mode."""
    register()
    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()
