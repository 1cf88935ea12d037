"""What a pruned model is built from, as plain data: its dense architecture and the sizes of its blocks. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


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

    def units(self) -> dict[str, int]:
        """group → units, of those groups that are not as in the dense model."""
        attn = {} if self.attn is None else {"qk": self.attn.qk, "vo": self.attn.vo, "heads": self.attn.heads}
        return attn if self.mlp is None else {"mlp": self.mlp.hidden, **attn}
