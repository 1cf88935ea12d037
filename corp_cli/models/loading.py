"""Dense models from timm, the hub, a bundled file or a checkpoint; and their skeletons, without any network."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import timm
import torch
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from torch import Tensor, nn

from corp_cli.config.images import DataConfig
from corp_cli.config.prune import ModelConfig
from corp_cli.errors import CorpError
from corp_cli.images.sources import expand
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.huggingface import PREFIX, read_transformers
from corp_cli.models.offload import kept_in
from corp_cli.models.preprocess import put_own_cfg, with_overrides
from corp_cli.models.spec import DATA_KEYS, LOADING_ARGS, ModelSpec
from corp_cli.models.state_dict import fit_state_dict, read_state_dict, weights_in
from corp_cli.runtime import hub

# What may stand before the colon of model.name → timm's reader of its config.json: weights, architecture, arguments.
SOURCES: dict[str, Callable[[str], tuple[dict[str, Any], str, dict[str, Any]]]] = {
    "hf-hub": load_model_config_from_hf,
    "local-dir": load_model_config_from_path,
}
WEIGHT_SOURCES = ("source", "url", "file", "hf_hub_id", "hf_hub_filename", "state_dict", "custom_load")


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def load_dense(cfg: ModelConfig, data: DataConfig | None = None, seed: int = 0) -> tuple[nn.Module, ModelSpec]:
    """The dense model named by `cfg` with its weights, in eval mode on the CPU, and what builds it again.

    `data` overrides the model's own preprocessing; `seed` is that of the weights of pretrained=false. Raises CorpError
    for an unknown name, weights out of reach, a checkpoint that does not fit, or preprocessing that does not suit it.
    """
    origin = _origin(cfg)
    pretrained = cfg.pretrained and origin.state is None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _create(cfg.name, origin, pretrained)
    if origin.state is not None:
        fit_state_dict(model, origin.state, origin.weights)
    require_finite(model)
    if origin.label_names:
        model.pretrained_cfg = {**model.pretrained_cfg, "label_names": origin.label_names}
    spec = spec_of(model, origin.timm_name, origin.args, origin.data)
    if data:
        spec = replace(spec, data=with_overrides(spec.data, data, model))
    put_own_cfg(model, spec.data)
    return model.eval(), spec


@dataclass(frozen=True)
class Origin:
    """What a dense model is made of; where `state` is None, timm is asked for the weights."""

    timm_name: str
    args: dict[str, Any]
    data: dict[str, Any]
    state: dict[str, Tensor] | None
    weights: str = ""  # where `state` comes from
    label_names: list[str] = field(default_factory=list)
    pretrained_cfg: dict[str, Any] | None = None  # what a config.json says of the weights that timm is to put in


def _origin(cfg: ModelConfig) -> Origin:
    """The origin of a model of transformers, a bundled model, one of timm, or one that a config.json describes."""
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
        name, args, pretrained_cfg = _described(cfg, weights=cfg.pretrained and state is None)
        return Origin(name, {**args, **cfg.args}, {}, state, str(checkpoint), pretrained_cfg=pretrained_cfg)
    return Origin(bundled.timm_name, {**bundled.args, **cfg.args}, bundled.data, state, str(checkpoint))


def _described(cfg: ModelConfig, weights: bool) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """(architecture, arguments, pretrained_cfg) behind hf-hub: or local-dir:, as the config.json there says.

    `weights` in a folder are read here, by corp's own reader, and passed to timm as tensors. A plain name is itself.
    """
    source, colon, place = cfg.name.partition(":")
    if not colon:
        return cfg.name, {}, None
    if source not in SOURCES:
        raise CorpError(
            f"Unknown model source {source} in model.name={cfg.name}; there are {', '.join(SOURCES)} and transformers."
        )
    folder, asked = expand(place), source == "hf-hub"
    with hub.asked() if asked else contextlib.nullcontext() as silence:
        try:
            pretrained_cfg, name, args = SOURCES[source](place if asked else str(folder))
            name, args = str(name), dict(args)
        except Exception as error:
            if asked:
                raise _not_fetched(cfg.name, hub.failure(error, silence), hub.missing(error)) from error
            raise CorpError(
                f"model.name={cfg.name} leads to no config.json that timm wrote; check the folder."
            ) from error
    if source == "local-dir":
        pretrained_cfg = {key: value for key, value in pretrained_cfg.items() if key not in WEIGHT_SOURCES}
        if weights:
            pretrained_cfg["state_dict"] = read_state_dict(weights_in(folder))
    return name, args, pretrained_cfg


def _create(name: str, origin: Origin, pretrained: bool) -> Any:
    """The model of `origin`, which the user calls `name`."""
    require_known(origin.timm_name, origin.args)
    described = origin.pretrained_cfg
    asked = pretrained and "state_dict" not in (described or {})
    with hub.asked() if asked else contextlib.nullcontext() as silence:
        if silence and _lacks_weights(origin):
            raise _not_fetched(name, hub.not_held(silence))
        try:
            model: Any = _built(origin, pretrained, described)
        except CorpError:
            raise
        except (TypeError, AssertionError) as error:
            raise CorpError(f"{name} cannot be built with model.args={origin.args}: {error}.") from error
        except Exception as error:
            if asked:
                raise _not_fetched(name, hub.failure(error, silence), hub.missing(error)) from error
            raise CorpError(f"{name} cannot be built: {' '.join(str(error).split())[:400]}") from error
    if pretrained and not _has_weights(model):
        raise CorpError(f"timm has no pretrained weights for {name}; pass model.checkpoint=FILE or another name.")
    model.pretrained_cfg.pop("state_dict", None)
    assert isinstance(model, nn.Module)
    return model


def _built(origin: Origin, pretrained: bool, pretrained_cfg: dict[str, Any] | None) -> nn.Module:
    """The architecture with its weights; where those of `origin` take their place, without making any."""

    def anew() -> nn.Module:
        return build(origin.timm_name, origin.args, pretrained=pretrained, pretrained_cfg=pretrained_cfg)

    if not origin.state:
        return anew()
    with torch.device("meta"):
        model = anew()
    return filled(model, anew)


def _lacks_weights(origin: Origin) -> bool:
    """Whether nothing of the repository that timm would take the weights from is in the hub's cache.

    timm would find that out after it has made the whole model. False where it may take them from elsewhere.
    """
    about = origin.pretrained_cfg
    if about is None:
        with contextlib.suppress(RuntimeError):  # of a tag that timm does not know: building the model says so
            found = timm.get_pretrained_cfg(origin.timm_name)
            about = vars(found) if found else None
    repository = str((about or {}).get("hf_hub_id") or "")
    return bool(repository) and not hub.held(repository) and not os.environ.get("TIMM_USE_OLD_CACHE")


def _not_fetched(name: str, why: str, missing: bool = True) -> CorpError:
    if not missing:
        return CorpError(f"The weights of {name} cannot be fetched ({why}); or pass model.checkpoint=FILE.safetensors.")
    return CorpError(
        f"The weights of {name} cannot be fetched ({why}); without a network, download them elsewhere and pass "
        "model.checkpoint=FILE.safetensors, or fill the hub's cache (HF_HOME) and set HF_HUB_OFFLINE=1."
    )


def build(name: str, args: dict[str, Any], **loading: Any) -> nn.Module:
    """timm.create_model of an architecture with `args` of its own; only the caller says what is loaded.

    Raises CorpError as `require_known` does.
    """
    require_known(name, args)
    model = timm.create_model(name, **args, **loading)
    assert isinstance(model, nn.Module)
    return model


def require_known(name: str, args: dict[str, Any]) -> None:
    """Raise CorpError for a name that timm does not know, and for an argument that is not one of the architecture."""
    if not timm.is_model(name.partition(".")[0]):
        near = [one for one in timm.list_models() if one.startswith(name)][:3]
        near = near or difflib.get_close_matches(name, [*BUNDLED, *timm.list_models()], n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists the names."
        raise CorpError(f"model.name={name} is neither a bundled model nor a timm model; {hint}")
    known = architecture_args(name)
    for key in args:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = "weights are given as model.checkpoint" if key in LOADING_ARGS else "leave it out"
            hint = f"did you mean {near[0]}?" if near else f"{hint}."
            raise CorpError(
                f"{name} cannot be built with model.args.{key}, which is no argument of its architecture; {hint}"
            )


def architecture_args(name: str) -> set[str]:
    """The arguments of the model classes in the module of timm that defines the architecture `name`.

    Everything else that timm.create_model takes says where weights come from or what is made of the model.
    """
    module = sys.modules[timm.models.model_entrypoint(name).__module__]
    classes = _model_classes(module) or _model_classes(timm.models)  # a user's own entry may hold no class
    made = [vars(base)["__init__"] for cls in classes for base in cls.__mro__ if "__init__" in vars(base)]
    parameters = [p for init in made for p in list(inspect.signature(init).parameters.values())[1:]]
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - LOADING_ARGS


def _model_classes(module: Any) -> list[type]:
    return [cls for cls in vars(module).values() if isinstance(cls, type) and hasattr(cls, "reset_classifier")]


def _has_weights(model: nn.Module) -> bool:
    cfg: Any = getattr(model, "pretrained_cfg", None) or {}
    return any(cfg.get(key) for key in ("url", "hf_hub_id", "file", "state_dict"))


def require_finite(model: nn.Module) -> None:
    """Raise CorpError that names a tensor with NaN or infinite values."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CorpError(f"The weights hold NaN or infinite values in {name}; use a sound checkpoint.")


def spec_of(model: Any, name: str, args: dict[str, Any], data: dict[str, Any]) -> ModelSpec:
    """What builds `model` again; arguments that a tag would supply are made explicit, so that none is needed later."""
    args = {**args, "num_classes": model.num_classes}
    if hasattr(model, "patch_embed") and getattr(model.patch_embed, "img_size", None):
        args["img_size"] = list(model.patch_embed.img_size)
    data = {**timm.data.resolve_model_data_config(model), **data}
    if "img_size" in args:  # given on building, it changes the model and not what timm says of its images
        data["input_size"] = [data["input_size"][0], *args["img_size"]]
    channels = args.get("in_chans", data["input_size"][0])
    data["input_size"] = [channels, *data["input_size"][1:]]
    for key in ("mean", "std"):
        if channels == 1 < len(data[key]):
            data[key] = [sum(data[key]) / len(data[key])]  # of grey images
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in data.items() if key in DATA_KEYS}
    return ModelSpec(name, args, plain)


def skeleton(spec: ModelSpec) -> nn.Module:
    """The dense architecture with meta tensors: shapes without memory."""
    with torch.device("meta"):
        return build(spec.name, spec.args).eval()


def filled(model: nn.Module, anew: Callable[[], nn.Module]) -> Any:
    """`model`, which is a skeleton, on the CPU: its state yet to be read, the rest computed.

    Where timm cannot compute what is no part of the state in place, it is what `anew` makes, in its dtype.
    """
    computed = [module for module in model.modules() if module._non_persistent_buffers_set]
    if all(hasattr(module, "init_non_persistent_buffers") for module in computed):
        model.to_empty(device="cpu")
        for module in computed:
            cast(Any, module).init_non_persistent_buffers()
        return model
    return anew().eval().to(next(parameter.dtype for parameter in model.parameters()))


def parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as contiguous CPU tensors, weights in the dtype in which the model is kept."""
    weights, dtype = dict(model.named_parameters()), kept_in(model)
    return {
        name: tensor.detach().to("cpu", dtype if name in weights else None).contiguous()
        for name, tensor in model.state_dict().items()
    }
