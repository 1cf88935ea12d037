"""What a pruned model is built from, as plain data: its dense architecture and the sizes of its blocks. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from corp_cli.measure.results import Count
from corp_cli.models.blocks import Sizes

# What images are prepared by, and as which types.
DATA_TYPES = {
    "input_size": list[int],
    "mean": list[float],
    "std": list[float],
    "interpolation": str,
    "crop_pct": float,
    "crop_mode": str,
}
DATA_KEYS = tuple(DATA_TYPES)
# 1 knew no blocks that update only some tokens, 2 none that merge any, 3 no counts, 4 no training after pruning, 5 no
# LayerScale in linear layers
FORMAT_VERSION = 6
# Arguments of timm.create_model, and of what it calls, that say where weights come from, how they are put in or what is
# made of the model. None belongs to an architecture, and in a file some would make timm open another file.
LOADING_ARGS = frozenset(
    {"model_name", "variant", "model_cls", "model_cfg", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}
    | {"pretrained_strict", "pretrained_filter_fn", "pretrained_model_args", "checkpoint_path", "cache_dir", "pruned"}
    | {"scriptable", "exportable", "no_jit", "features_only", "feature_cfg", "feature_cls", "out_indices"}
    | {"kwargs_filter", "device", "dtype"}
)


@dataclass(frozen=True)
class ModelSpec:
    """All that builds the dense architecture again: timm name, arguments, and the preprocessing of its images."""

    name: str
    args: dict[str, Any]
    data: dict[str, Any]


@dataclass(frozen=True)
class AttentionSizes:
    """Heads, width of q and k, width of v, what multiplies the logits, and which Linear has a bias."""

    heads: int
    qk: int
    vo: int
    scale: float
    qkv_bias: bool
    proj_bias: bool


@dataclass(frozen=True)
class MlpSizes:
    """What a pruned MLP is built from besides the dense module."""

    hidden: int
    fc2_bias: bool


@dataclass(frozen=True)
class PrunedSizes:
    """Sizes of one block; None where the module is as in the dense model."""

    attn: AttentionSizes | None = None
    mlp: MlpSizes | None = None
    tokens: int | None = None  # only so many leading tokens are updated; None: all
    merge: int | None = None  # tokens merged; None: before the first block that merges any
    folded: bool = False  # LayerScale is part of its linear layers, where it can be

    def units(self) -> dict[str, int]:
        """group → units, of those groups that are not as in the dense model."""
        attn = {} if self.attn is None else {"qk": self.attn.qk, "vo": self.attn.vo, "heads": self.attn.heads}
        return attn if self.mlp is None else {"mlp": self.mlp.hidden, **attn}


@dataclass(frozen=True)
class Counts:
    """What follows from the shapes, so that the file can be described without building its model."""

    dense: Count
    pruned: Count
    blocks: dict[str, Sizes]  # of the dense model


@dataclass(frozen=True)
class Manifest:
    """What a pruned checkpoint says of itself."""

    model: ModelSpec
    blocks: dict[str, PrunedSizes]  # those that differ from the dense model's
    recipe: dict[str, Any]
    dense_sha256: str  # of the dense weights it was made from
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    counts: Counts | None = None  # filled in where the file is written; older files have none
    pruned_sha256: str | None = None  # of the weights as corp left them; older files have none
    trained: bool = False  # the weights are other ones

    def to_json(self) -> str:
        """For the metadata of the file."""
        return json.dumps(asdict(self), sort_keys=True)
