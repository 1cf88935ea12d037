"""Dense models from timm, the hub, a bundled file or a checkpoint; and their skeletons, without any network."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from typing import Any

import timm
import torch
from timm.models import load_model_config_from_hf
from torch import Tensor, nn

from corp_cli.config.prune import DataConfig, ModelConfig
from corp_cli.errors import CorpError
from corp_cli.images.sources import expand
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.huggingface import PREFIX, read_transformers
from corp_cli.models.preprocess import with_overrides
from corp_cli.models.state_dict import fit_state_dict, read_state_dict

DATA_KEYS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


@dataclass(frozen=True)
class ModelSpec:
    """All that builds the dense architecture again: timm name, arguments, and the preprocessing of its images."""

    name: str
    args: dict[str, Any]
    data: dict[str, Any]


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def load_dense(cfg: ModelConfig, data: DataConfig | None = None) -> tuple[nn.Module, ModelSpec]:
    """The dense model named by `cfg` with its weights, in eval mode on the CPU, and what builds it again.

    `data` overrides the model's own preprocessing. Raises CorpError for an unknown name, weights out of reach, a
    checkpoint that does not fit, or preprocessing that does not suit the model.
    """
    origin = _origin(cfg)
    model = _create(origin.timm_name, origin.args, pretrained=cfg.pretrained and origin.state is None)
    if origin.state is not None:
        fit_state_dict(model, origin.state, origin.weights)
    _require_finite(model)
    if origin.label_names:
        model.pretrained_cfg = {**model.pretrained_cfg, "label_names": origin.label_names}
    spec = _spec(model, origin.timm_name, origin.args, origin.data)
    return model.eval(), replace(spec, data=with_overrides(spec.data, data, model)) if data else spec


@dataclass(frozen=True)
class Origin:
    """What a dense model is made of; where `state` is None, timm is asked for the weights."""

    timm_name: str
    args: dict[str, Any]
    data: dict[str, Any]
    state: dict[str, Tensor] | None
    weights: str = ""  # where `state` comes from
    label_names: list[str] = field(default_factory=list)


def _origin(cfg: ModelConfig) -> Origin:
    """The origin of a model of transformers, a bundled model, or one of timm."""
    if cfg.name.startswith(PREFIX):
        if cfg.checkpoint:
            raise CorpError(f"model.name={cfg.name} brings its weights along; leave out model.checkpoint.")
        found = read_transformers(cfg.name)
        args = {**found.args, **cfg.args}
        return Origin(found.timm_name, args, found.data, found.state, cfg.name, found.label_names)
    bundled = BUNDLED.get(cfg.name)
    checkpoint = expand(cfg.checkpoint) if cfg.checkpoint else bundled.weights if bundled else None
    state = read_state_dict(checkpoint) if checkpoint else None
    if bundled is None:
        return Origin(cfg.name, cfg.args, {}, state, str(checkpoint))
    return Origin(bundled.timm_name, {**bundled.args, **cfg.args}, bundled.data, state, str(checkpoint))


def _create(name: str, args: dict[str, Any], pretrained: bool) -> Any:
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        near = difflib.get_close_matches(name, [*BUNDLED, *timm.list_models()], n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists the names."
        raise CorpError(f"model.name={name} is neither a bundled model nor a timm model; {hint}")
    try:
        model = timm.create_model(name, pretrained=pretrained, **args)
    except (TypeError, AssertionError) as error:
        raise CorpError(f"{name} cannot be built with model.args={args}: {error}.") from error
    except Exception as error:
        if not pretrained:
            raise CorpError(f"{name} cannot be built: {_first_line(error)}") from error
        raise CorpError(
            f"The weights of {name} cannot be fetched ({type(error).__name__}: {_first_line(error)}); without a "
            "network, download them elsewhere and pass model.checkpoint=FILE.safetensors, or fill the hub's cache "
            "(HF_HOME) and set HF_HUB_OFFLINE=1."
        ) from error
    if pretrained and not _has_weights(model):
        raise CorpError(f"timm has no pretrained weights for {name}; pass model.checkpoint=FILE or another name.")
    assert isinstance(model, nn.Module)
    return model


def _has_weights(model: nn.Module) -> bool:
    cfg: Any = getattr(model, "pretrained_cfg", None) or {}
    return any(cfg.get(key) for key in ("url", "hf_hub_id", "file", "state_dict"))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _require_finite(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CorpError(f"The weights hold NaN or infinite values in {name}; use a sound checkpoint.")


def _spec(model: Any, name: str, args: dict[str, Any], data: dict[str, Any]) -> ModelSpec:
    """Arguments that a tag or the hub's config would supply are made explicit, so that no network is needed later."""
    source, _, hub_id = name.rpartition(":")
    if source == "hf-hub":
        _, name, hub_args = load_model_config_from_hf(hub_id)
        args = {**(hub_args or {}), **args}
    args = {**args, "num_classes": model.num_classes}
    if hasattr(model, "patch_embed") and getattr(model.patch_embed, "img_size", None):
        args["img_size"] = list(model.patch_embed.img_size)
    data = {**timm.data.resolve_model_data_config(model), **data}
    if "img_size" in args:  # given on building, it changes the model and not what timm says of its images
        data["input_size"] = [data["input_size"][0], *args["img_size"]]
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in data.items() if key in DATA_KEYS}
    return ModelSpec(name, args, plain)


def skeleton(spec: ModelSpec) -> nn.Module:
    """The dense architecture with meta tensors: shapes without memory."""
    with torch.device("meta"):
        model = timm.create_model(spec.name, pretrained=False, **spec.args)
    assert isinstance(model, nn.Module)
    return model.eval()


def empty_model(spec: ModelSpec) -> nn.Module:
    """The dense architecture on the CPU, its tensors still to be filled; preprocessing as in `spec.data`."""
    model: Any = skeleton(spec)
    if any(module._non_persistent_buffers_set for module in model.modules()):
        model = timm.create_model(spec.name, pretrained=False, **spec.args).eval()  # computed, not stored, buffers
    else:
        model.to_empty(device="cpu")
    # resolve_model_data_config(model) then answers with the transform the model was calibrated with.
    model.pretrained_cfg = {**model.pretrained_cfg, **spec.data}
    assert isinstance(model, nn.Module)
    return model


def parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as contiguous CPU tensors."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
