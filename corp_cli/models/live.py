"""A model that a program holds: what builds it again in timm, read off the module, and a copy that corp may work on.

A pruned checkpoint names an architecture and its arguments. A module in memory does not say which arguments it was
built with, so they are read off it, and the copy that is built by them has to put out the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from timm.layers import GluMlp, LayerScale
from timm.models import is_model
from timm.models.eva import Eva
from torch import Tensor, nn

from corp_cli.config.images import DataConfig
from corp_cli.errors import CorpError
from corp_cli.models.adapter import block_names, blocks_of
from corp_cli.models.huggingface import filled, rewritten, understood
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.loading import architecture_args, build, require_finite, skeleton, spec_of, state_tensors
from corp_cli.models.preprocess import put_own_cfg, with_overrides
from corp_cli.models.spec import ModelSpec
from corp_cli.models.state_dict import misfits

SAY_SO = "overrides=('model.name=NAME', '+model.args.KEY=VALUE') of prune_model say how timm builds it"
PROBES = 2  # random images on which the copy must put out what the model does


def _mlp_ratio(model: Any, block: Any) -> float:
    """Of the width asked for, which timm rounds down; of classes that pack value and gate, only Eva doubles it."""
    packed = isinstance(block.mlp, GluMlp) and not isinstance(model, Eva)
    hidden = block.mlp.fc1.out_features if packed else block.mlp.fc2.in_features
    width = block.mlp.fc2.out_features
    exact: float = hidden / width
    return exact if int(width * exact) == hidden else (hidden + 0.5) / width


def _qkv_bias(model: Any, block: Any) -> bool:
    attn = block.attn
    if getattr(attn, "q_bias", None) is not None:
        return True
    return (attn.q_proj if attn.qkv is None else attn.qkv).bias is not None


def _window(model: Any, block: Any) -> Any:
    """Of a Swin transformer, or of those blocks of SAM that have one."""
    if hasattr(model, "layers"):
        return _side(block.window_size)
    return next((each.window_size for each in model.blocks if each.window_size), 0)


def _present(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.Identity)


# What (model, first block) say of the arguments of timm.create_model. One that they do not have raises AttributeError.
ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "patch_size": lambda model, block: _side(model.patch_embed.patch_size),
    "in_chans": lambda model, block: model.patch_embed.proj.in_channels,
    "embed_dim": lambda model, block: model.patch_embed.proj.out_channels,
    "depth": lambda model, block: len(model.blocks),
    "depths": lambda model, block: [len(stage.blocks) for stage in model.layers],
    "num_heads": lambda model, block: _of_stages(model, lambda first: first.attn.num_heads),
    "window_size": _window,
    "global_attn_indexes": lambda model, block: [i for i, each in enumerate(model.blocks) if each.window_size == 0],
    "neck_chans": lambda model, block: model.neck[0].out_channels if len(model.neck) else 0,
    "mlp_ratio": _mlp_ratio,
    "qkv_bias": _qkv_bias,
    "proj_bias": lambda model, block: block.attn.proj.bias is not None,
    "qk_norm": lambda model, block: _present(block.attn.q_norm),
    "scale_attn_norm": lambda model, block: _present(block.attn.norm),
    "scale_mlp_norm": lambda model, block: _present(block.mlp.norm),
    "init_values": lambda model, block: 1e-5 if isinstance(block.ls1, LayerScale) else None,
    "pre_norm": lambda model, block: _present(model.norm_pre),
    "class_token": lambda model, block: model.cls_token is not None,
    "reg_tokens": lambda model, block: model.num_reg_tokens,
    "global_pool": lambda model, block: model.global_pool,
    "dynamic_img_size": lambda model, block: model.dynamic_img_size,
    "drop_rate": lambda model, block: model.head_drop.p,
    "pos_drop_rate": lambda model, block: model.pos_drop.p,
    "proj_drop_rate": lambda model, block: block.attn.proj_drop.p,
    "attn_drop_rate": lambda model, block: block.attn.attn_drop.p,
    "drop_path_rate": lambda model, block: round(getattr(_last_block(model).drop_path1, "drop_prob", 0.0), 6),
}


def _side(size: Any) -> Any:
    pair = list(size) if isinstance(size, tuple | list) else [size] * 2
    return pair[0] if pair[0] == pair[1] else pair


def _of_stages(model: Any, read: Callable[[Any], Any]) -> Any:
    return [read(stage.blocks[0]) for stage in model.layers] if hasattr(model, "layers") else read(model.blocks[0])


def _last_block(model: nn.Module) -> Any:
    return model.get_submodule(block_names(model)[-1])


def live_model(
    model: nn.Module, name: str | None, args: dict[str, Any], data: DataConfig, shared: bool = False
) -> LoadedModel:
    """A copy of `model` in float32, in eval mode on the CPU, built anew by timm; `model` stays as it is.

    name, args: how timm builds it, as far as the caller knows; the rest is read off it. `data` overrides its own
    preprocessing. shared: a model of timm is not built anew, so that of timm only the shapes are compared; it has the
    very tensors of `model`, in their dtype. Raises CorpError for a model that corp cannot prune, or that timm builds
    otherwise.
    """
    shared = shared and not is_transformers(model)
    require_one_kind(model)
    require_finite(model)
    if is_transformers(model):
        timm_name, args, own, state = _of_transformers(model)
    else:
        blocks_of(model)
        timm_name = name or name_of(model)
        args, own, state = {**read_args(model, timm_name, args), **args}, {}, state_tensors(model)
    twin: Any = _sharing(model, timm_name, args, state) if shared else _rebuilt(model, timm_name, args, state)
    twin.pretrained_cfg = {**twin.pretrained_cfg, **(getattr(model, "pretrained_cfg", None) or {})}
    spec = spec_of(twin, timm_name, args, own)
    spec = replace(spec, data=with_overrides(spec.data, data, twin))
    put_own_cfg(twin, spec.data)
    if not shared:
        require_same_outputs(model, twin, spec)
    return LoadedModel(name or timm_name, twin, spec)


def require_one_kind(model: nn.Module) -> None:
    """Raise CorpError unless all parameters are plain floats of one dtype, with values, on one device."""
    kinds = {(p.dtype, p.device) for p in model.parameters()}
    if not kinds:
        raise CorpError(f"The {type(model).__name__} has no parameters, so there is nothing to prune.")
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)).replace("torch.", "")
        raise CorpError(f"The model has parameters in {listed}; bring them together with model.to(device, dtype).")
    ((dtype, device),) = kinds
    if device.type == "meta" or not dtype.is_floating_point or dtype.itemsize == 1:
        raise CorpError(f"The model has parameters in {dtype} on {device}; prune it before it is quantised or emptied.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of torch.compile, DataParallel and DistributedDataParallel; any other is itself."""
    while len(inner := dict(model.named_children())) == 1 and inner.keys() <= {"_orig_mod", "module"}:
        model = next(iter(inner.values()))
    return model


# --- how it was built -----------------------------------------------------------------------------------------


def name_of(model: nn.Module) -> str:
    """timm's name of the architecture, without the tag of weights: it has its own."""
    name = str((getattr(model, "pretrained_cfg", None) or {}).get("architecture", ""))
    if not is_model(name):
        kind = type(model).__name__
        raise CorpError(f"The {kind} does not say which model of timm it is, in pretrained_cfg; {SAY_SO}.")
    return name


def read_args(model: nn.Module, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments in which `model` differs from what timm builds as `name`, but for those `given`."""
    plain, known = skeleton(ModelSpec(name, {}, {})), architecture_args(name)
    readable = [key for key in ARGUMENTS if key in known and key not in given]
    ours, theirs = ({key: _read(key, one) for key in readable} for one in (model, plain))
    found = {key: ours[key][0] for key in readable if ours[key] and ours[key] != theirs[key]}
    head = getattr(model, "head", None)
    classes = head.out_features if isinstance(head, nn.Linear) else getattr(model, "num_classes", None)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return {**found, "num_classes": classes, **({"img_size": list(size)} if size else {})}


def _read(key: str, model: nn.Module) -> tuple[Any, ...]:
    """(the argument `key`,), or nothing where the model does not have it."""
    try:
        return (ARGUMENTS[key](model, model.get_submodule(block_names(model)[0])),)
    except (AttributeError, TypeError, IndexError):
        return ()


def _rebuilt(model: nn.Module, name: str, args: dict[str, Any], state: dict[str, Tensor]) -> nn.Module:
    """What timm builds as `name`, with the weights `state` of `model` in float32."""
    with torch.random.fork_rng(devices=[]):
        twin = _built(model, name, args, state, build)
    twin.load_state_dict(state)
    return twin.float().eval()


def _sharing(model: nn.Module, name: str, args: dict[str, Any], state: dict[str, Tensor]) -> nn.Module:
    """A module of its own with the tensors of `model`, which has the shapes of what timm builds as `name`."""
    _built(model, name, args, state, lambda name, args: skeleton(ModelSpec(name, args, {})))
    tensors = chain(model.parameters(), model.buffers())
    memo = {id(t): nn.Parameter(t.data, t.requires_grad) if isinstance(t, nn.Parameter) else t.data for t in tensors}
    return copy.deepcopy(model, memo).eval()


def _built(
    model: nn.Module,
    name: str,
    args: dict[str, Any],
    state: dict[str, Tensor],
    make: Callable[[str, dict[str, Any]], nn.Module],
) -> nn.Module:
    """What `make` makes of `name` and `args`, which takes the weights `state` of `model`."""
    kind = type(model).__name__
    try:
        twin = make(name, args)
    except CorpError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise CorpError(f"timm cannot build the {kind} as {name} with {args} ({why}); {SAY_SO}.") from error
    if wrong := misfits(twin, state):
        raise CorpError(f"The {kind} is not what timm builds as {name} with {args}: {wrong}; {SAY_SO}.")
    return twin


# --- whether it is the same -----------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` is in eval mode in the body, and every part of it in its own mode again behind it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def require_same_outputs(model: nn.Module, copy: nn.Module, spec: ModelSpec) -> None:
    """Raise CorpError unless `copy` puts out what `model` does, within rounding, on random images."""
    own, kind = next(model.parameters()), type(model).__name__
    x = torch.randn(PROBES, *spec.data["input_size"], generator=torch.Generator().manual_seed(0))
    with evaluating(model):
        try:
            found = _output(model, x.to(own))
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise CorpError(
                f"The {kind} cannot be run on images of {list(x.shape)} ({why}); check the model."
            ) from error
    expected = copy.forward_features(x) if _gives_tokens(model) else copy(x)  # type: ignore[operator]
    found, close = found.float().cpu(), max(torch.finfo(dtype).eps for dtype in (own.dtype, x.dtype)) ** 0.5
    if found.shape != expected.shape or not (found - expected).abs().max() <= close * expected.abs().max():
        same = f"timm's {spec.name} with {spec.args} and the same weights"
        raise CorpError(f"The {kind} puts out something else than {same}; {SAY_SO}.")


def _gives_tokens(model: nn.Module) -> bool:
    """Whether it is a model of transformers without a classifier, which gives all tokens."""
    return is_transformers(model) and not hasattr(model, "classifier") and not hasattr(model, "cls_classifier")


def _output(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    if isinstance(found, Tensor):
        return found
    tensor: Tensor = found.last_hidden_state if _gives_tokens(model) else found.logits
    return tensor


# --- transformers ---------------------------------------------------------------------------------------------


def is_transformers(model: nn.Module) -> bool:
    """Whether `model` is one of Hugging Face transformers."""
    return callable(getattr(getattr(model, "config", None), "to_dict", None))


def _of_transformers(model: Any) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """(timm's name, arguments, preprocessing, weights) of the same model in timm."""
    config = filled(model.config.to_dict())
    with understood(type(model).__name__):
        found = rewritten(state_tensors(model), config, None, type(model).__name__)
    return found.timm_name, found.args, found.data, found.state
