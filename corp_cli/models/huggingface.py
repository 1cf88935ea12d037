"""Models of Hugging Face `transformers`, rewritten as the timm model of the same architecture.

A folder or a repository of the hub holds config.json, weights and preprocessor_config.json; reading them needs no
`transformers`. The rewritten model computes the same, so everything else, loading a pruned checkpoint included, knows
timm only. Both the names in files on the hub and those of transformers 5 are understood.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from corp_cli.errors import CorpError
from corp_cli.images.sources import expand
from corp_cli.models.image_processors import image_data
from corp_cli.models.state_dict import read_state_dict
from corp_cli.runtime import hub

PREFIX = "transformers:"
FILES = ["*.json", "*.safetensors", "pytorch_model*.bin"]
# what config.json may leave out; and where a model's own differs
DEFAULTS = {"image_size": 224, "patch_size": 16, "num_channels": 3, "hidden_act": "gelu"} | {
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "dinov2": {"patch_size": 14},
    "siglip_vision_model": {"hidden_act": "gelu_pytorch_tanh"},
}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}

# (pattern in the names of transformers, name in timm); the first that matches the whole name counts
BLOCK = r"(?:encoder\.)?layers?\.(\d+)\."
NAMES = [
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.distillation_token", "dist_token"),
    (r"embeddings\.register_tokens", "reg_token"),
    (r"embeddings\.position_embeddings?(?:\.weight)?", "pos_embed"),
    (r"embeddings\.patch_embeddings?(?:\.projection)?\.(weight|bias)", r"patch_embed.proj.\1"),
    (BLOCK + r"(?:attention\.attention|attention|self_attn)\.q(?:uery|_proj)\.(weight|bias)", r"blocks.\1.attn.q.\2"),
    (BLOCK + r"(?:attention\.attention|attention|self_attn)\.k(?:ey|_proj)\.(weight|bias)", r"blocks.\1.attn.k.\2"),
    (BLOCK + r"(?:attention\.attention|attention|self_attn)\.v(?:alue|_proj)\.(weight|bias)", r"blocks.\1.attn.v.\2"),
    (BLOCK + r"(?:attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.(.*)", r"blocks.\1.attn.proj.\2"),
    (BLOCK + r"(?:layernorm_before|layer_norm1|norm1)\.(.*)", r"blocks.\1.norm1.\2"),
    (BLOCK + r"(?:layernorm_after|layer_norm2|norm2)\.(.*)", r"blocks.\1.norm2.\2"),
    (BLOCK + r"(?:intermediate\.dense|mlp\.fc1|mlp\.weights_in)\.(.*)", r"blocks.\1.mlp.fc1.\2"),
    (BLOCK + r"mlp\.(gate|up)_proj\.(weight|bias)", r"blocks.\1.mlp.\2.\3"),
    (BLOCK + r"(?:output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.down_proj)\.(.*)", r"blocks.\1.mlp.fc2.\2"),
    (BLOCK + r"layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (r"(?:post_)?layernorm\.(.*)", r"norm.\1"),
    (r"(?:cls_)?classifier\.(.*)", r"head.\1"),
    (r"distillation_classifier\.(.*)", r"head_dist.\1"),
    (r"head\.probe", "attn_pool.latent"),
    (r"head\.attention\.in_proj_(weight|bias)", r"attn_pool.qkv.\1"),
    (r"head\.attention\.out_proj\.(.*)", r"attn_pool.proj.\1"),
    (r"head\.layernorm\.(.*)", r"attn_pool.norm.\1"),
    (r"head\.mlp\.(.*)", r"attn_pool.mlp.\1"),
]
UNUSED = re.compile(
    r"(?:.*\.)?(?:pooler\..*|embeddings\.mask_token|embeddings\.position_ids)|(?:text_model|decoder)\..*|"
    r"logit_(?:scale|bias)"
)
TOWERS = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.", "vision_model.")  # before the names of a model's body


@dataclass(frozen=True)
class Rewritten:
    """The timm model that a model of transformers is: name, arguments, preprocessing, class names, weights."""

    timm_name: str
    args: dict[str, Any]
    data: dict[str, Any]
    label_names: list[str]
    state: dict[str, Tensor]


def read_transformers(name: str) -> Rewritten:
    """The model in the folder, or the repository of the hub, behind `transformers:`.

    Raises CorpError for a folder without its files, a hub out of reach, or an architecture that has no match in timm.
    """
    folder = _folder(name)
    config = _json(folder / "config.json")
    if config is None:
        raise CorpError(
            f"model.name={name} leads to no config.json; give a folder or repository that transformers wrote."
        )
    with understood(name):
        config = filled(config)
        return rewritten(_weights(folder, name), config, _json(folder / "preprocessor_config.json"), name)


@contextmanager
def understood(name: str) -> Iterator[None]:
    """Raises CorpError where the body meets what no model of transformers has."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CorpError(
            f"model.name={name}: its config.json and weights are not those of a model that transformers wrote "
            f"({type(error).__name__}: {str(error)[:80]}); copy or download them again."
        ) from error


def rewritten(
    weights: dict[str, Tensor], config: dict[str, Any], processor: dict[str, Any] | None, name: str
) -> Rewritten:
    """The timm model that computes the same as the model of transformers with these weights and this `config`.

    `config` is `filled`, `processor` the content of preprocessor_config.json, `name` what messages call the model.
    """
    state = rename(weights)
    timm_name, args = architecture(config, state, name)
    labels = config.get("id2label") or {}
    names = [labels[key] for key in sorted(labels, key=int)] if args["num_classes"] == len(labels) else []
    data = image_data(processor, config, name)
    return Rewritten(timm_name, args, data, names, state)


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model, or of its vision tower, with what transformers takes where it says nothing."""
    tower = config.get("vision_config", config)
    kind = tower.get("model_type", config.get("model_type"))
    kind = "siglip_vision_model" if kind == "siglip" else kind
    given = {**tower, "model_type": kind, "id2label": config.get("id2label")}
    return {**DEFAULTS, **OWN_DEFAULTS.get(kind, {}), **given}


def _folder(name: str) -> Path:
    place = name.removeprefix(PREFIX)
    if (folder := expand(place)).is_dir():
        return folder
    if place.count("/") != 1 or place.startswith((".", "/", "~")):
        raise CorpError(f"model.name={name}: there is no folder {place}; give a folder, or owner/name on the hub.")
    with hub.asked() as silence:
        try:
            return Path(snapshot_download(place, allow_patterns=FILES))
        except Exception as error:
            raise CorpError(
                f"The weights of {name} cannot be fetched ({hub.failure(error, silence)}); without a network, "
                "download the repository elsewhere and give its folder, as in model.name=transformers:path/to/folder."
            ) from error


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CorpError(f"{path} cannot be read ({type(error).__name__}); copy or download it again.") from error
    if not isinstance(content, dict):
        raise CorpError(f"{path} holds a {type(content).__name__}, not keys and values; copy or download it again.")
    return content


def _weights(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of the files of weights: those that an index names, or all; safetensors first."""
    for whole, others in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        index = None if (folder / whole).is_file() else _json(folder / f"{whole}.index.json")
        named = sorted({Path(str(file)).name for file in index["weight_map"].values()}) if index else []
        if missing := [file for file in named if not (folder / file).is_file()]:
            raise CorpError(f"model.name={name} lacks {missing[0]}, which its index names; copy or download it again.")
        one = [folder / whole] if (folder / whole).is_file() else []
        if files := [folder / file for file in named] or one or sorted(folder.glob(others)):
            break
    else:
        raise CorpError(f"model.name={name} leads to no weights (*.safetensors); copy or download them again.")
    return {key: tensor for file in files for key, tensor in read_state_dict(file).items()}


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers under timm's names, queries, keys and values in one.

    Raises CorpError for a name that no rule knows: leaving it out would change what the model computes.
    """
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        body = next((key.removeprefix(tower) for tower in TOWERS if key.startswith(tower)), key)
        if UNUSED.fullmatch(key) or UNUSED.fullmatch(body):
            continue
        for pattern, name in NAMES:
            if match := re.fullmatch(pattern, body):
                found[match.expand(name)] = tensor
                break
        else:
            raise CorpError(f"The weights hold {key}, which is no part of a ViT, DeiT, DINOv2 or SigLIP model.")
    return _joined(found)


def _joined(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts that timm keeps in one tensor, or in two."""
    state = {}
    for key, tensor in found.items():
        stem, kind = key.rpartition(".")[::2]
        if stem.endswith(".attn.q"):
            parts = [found[f"{stem[:-1]}{letter}.{kind}"] for letter in "qkv"]
            state[f"{stem[:-1]}qkv.{kind}"] = torch.cat(parts)
        elif stem.endswith(".mlp.gate"):
            state[f"{stem[:-4]}fc1.{kind}"] = torch.cat([tensor, found[f"{stem[:-4]}up.{kind}"]])
        elif stem == "attn_pool.qkv":
            width = len(tensor) // 3
            state[f"attn_pool.q.{kind}"], state[f"attn_pool.kv.{kind}"] = tensor[:width], tensor[width:]
        elif not stem.endswith((".attn.k", ".attn.v", ".mlp.up")):
            state[key] = tensor
    if state.get("pos_embed", torch.empty(0, 0, 0)).dim() == 2:
        state["pos_embed"] = state["pos_embed"][None]
    return state


def architecture(config: dict[str, Any], state: dict[str, Tensor], name: str) -> tuple[str, dict[str, Any]]:
    """(timm's name, arguments) of the model; fits `state` to it where the two keep the same differently.

    Raises CorpError where timm has no such model.
    """
    kind, width = config.get("model_type"), state["norm.weight"].shape[0]
    activation = config["hidden_act"]
    hidden = state["blocks.0.mlp.fc1.weight"].shape[0]
    packed = hidden != state["blocks.0.mlp.fc2.weight"].shape[1]
    classes = state["head.weight"].shape[0] if "head.weight" in state else 0
    args: dict[str, Any] = {
        "img_size": config["image_size"],
        "patch_size": config["patch_size"],
        "in_chans": config["num_channels"],
        "embed_dim": width,
        "depth": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "mlp_ratio": (hidden + 0.5) / width,  # timm rounds down to the width that is meant
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "num_classes": classes,
    }
    if activation not in ACTIVATIONS and not packed:
        raise CorpError(f"model.name={name} uses {activation}, for which there is no counterpart in timm.")
    if not packed:
        args["act_layer"] = ACTIVATIONS[activation]
    if kind == "vit":
        return "vit_base_patch16_224", args
    if kind == "deit" and "head_dist.weight" in state:
        return "deit_base_distilled_patch16_224", args
    if kind == "deit":  # the second token is there, and no head reads it
        state["reg_token"] = state.pop("dist_token")
        return "vit_base_patch16_224", {**args, "reg_tokens": 1}
    if kind in ("dinov2", "dinov2_with_registers") and not classes:
        if "reg_token" in state:  # timm adds no positions to registers, and that of the class token to itself
            state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
            state["pos_embed"] = state["pos_embed"][:, 1:]
            args["reg_tokens"] = state["reg_token"].shape[1]
        size = "giant" if packed else "base"
        return f"vit_{size}_patch14_{'reg4_' if 'reg_token' in state else ''}dinov2", args
    if kind in ("siglip", "siglip_vision_model") and not classes and "attn_pool.latent" in state:
        return "vit_base_patch16_siglip_224", args
    what = f"{kind} with a classifier" if classes else str(kind)
    raise CorpError(
        f"model.name={name} is a {what} model; of transformers, corp reads vit, deit, and the backbones of dinov2, "
        "dinov2_with_registers and siglip."
    )
