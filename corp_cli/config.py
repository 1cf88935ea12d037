"""The schema of `configs/`: typed dataclasses with range checks. Imports neither torch nor timm.

Each dataclass is one config group of `corp prune`; `register()` hands them to Hydra, so that unknown keys and
wrong types are refused by name before any work begins. Values are checked in `__post_init__`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, Optional, TypeVar

from corp_cli.errors import CorpError

if TYPE_CHECKING:
    from omegaconf import DictConfig

Config = TypeVar("Config")

RANKERS = ("activation", "magnitude", "random")
COMPENSATIONS = {
    "mlp": ("none", "mean", "affine"),
    "qk": ("none", "sylvester"),
    "vo": ("none", "mean", "affine"),
}
DEFAULT_JOINT = 0.5  # what `corp prune` removes when no sparsity is named


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise CorpError unless `value` is one of `choices`, naming the key and every choice."""
    if value not in choices:
        raise CorpError(f"{key}={value} is not a choice; use one of {', '.join(choices)}.")


def require_at_least(key: str, value: float, low: float) -> None:
    """Raise CorpError unless `value` >= `low`."""
    if not value >= low:
        raise CorpError(f"{key}={value} is out of range; it must be at least {low:g}.")


@dataclass
class ModelConfig:
    """Which dense model to prune and where its weights come from."""

    name: str = "vit_digits"  # a bundled model, a timm name, or hf-hub:owner/name
    pretrained: bool = True  # weights from timm or the hub, unless `checkpoint` is given
    checkpoint: Optional[str] = None  # .safetensors, .pth or .bin of the same architecture
    args: Dict[str, Any] = field(default_factory=dict)  # passed to timm.create_model


@dataclass
class SparsityConfig:
    """Fraction of each group to remove, in [0, 1). `joint=s` means mlp=s and qk=s (the paper's "Both")."""

    joint: Optional[float] = None  # 0.5 when no sparsity at all is given
    mlp: Optional[float] = None  # hidden channels
    qk: Optional[float] = None  # query/key dimensions of every head
    vo: Optional[float] = None  # value/output dimensions of every head
    heads: Optional[float] = None  # whole heads
    round_to: int = 8  # kept sizes are multiples of this, never above dense
    skip_unsupported: bool = False  # leave groups alone that a model's layers do not allow, and report them

    def __post_init__(self) -> None:
        for key in ("joint", "mlp", "qk", "vo", "heads"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value < 1.0:
                raise CorpError(
                    f"sparsity.{key}={value:g} is out of range; it is the fraction to remove, at least 0 and below 1."
                )
        if self.joint is not None and (self.mlp is not None or self.qk is not None):
            raise CorpError("sparsity.joint sets both sparsity.mlp and sparsity.qk; give joint alone or mlp and qk.")
        require_at_least("sparsity.round_to", self.round_to, 1)

    def fractions(self) -> dict[str, float]:
        """group → fraction to remove, for the groups mlp, qk, vo and heads."""
        joint = self.joint
        if all(value is None for value in (joint, self.mlp, self.qk, self.vo, self.heads)):
            joint = DEFAULT_JOINT
        given = {"mlp": self.mlp, "qk": self.qk, "vo": self.vo, "heads": self.heads}
        fractions = {group: value or 0.0 for group, value in given.items()}
        if joint is not None:
            fractions.update(mlp=joint, qk=joint)
        return fractions


@dataclass
class RankerConfig:
    """How the units of each group are scored (higher = keep)."""

    mlp: str = "activation"
    qk: str = "activation"
    vo: str = "activation"
    heads: str = "activation"

    def __post_init__(self) -> None:
        for group in ("mlp", "qk", "vo", "heads"):
            require_choice(f"ranker.{group}", getattr(self, group), RANKERS)


@dataclass
class CompensationConfig:
    """How the damage to each group is repaired in closed form."""

    mlp: str = "affine"  # Eq. 8-11, folded into fc2
    qk: str = "sylvester"  # Eq. 13-16, folded into the query and key projections
    vo: str = "affine"  # Eq. 8-11 on the head outputs, folded into proj; also repairs removed heads
    ridge_lambda: float = 1e-3  # relative to the mean diagonal of the covariance

    def __post_init__(self) -> None:
        for group, choices in COMPENSATIONS.items():
            require_choice(f"compensation.{group}", getattr(self, group), choices)
        require_at_least("compensation.ridge_lambda", self.ridge_lambda, 0.0)


@dataclass
class CalibrationConfig:
    """The unlabelled images that the statistics are measured on."""

    path: Optional[str] = None  # a folder of images; a bundled model brings its own
    num_images: int = 1024
    batch_size: int = 32
    num_workers: int = 2

    def __post_init__(self) -> None:
        require_at_least("calibration.num_images", self.num_images, 1)
        require_at_least("calibration.batch_size", self.batch_size, 1)
        require_at_least("calibration.num_workers", self.num_workers, 0)


@dataclass
class EvaluationConfig:
    """The images that fidelity, accuracy and throughput are measured on."""

    path: Optional[str] = None  # labelled when its sub-folders name classes; else fidelity only
    num_images: Optional[int] = None  # all of them
    batch_size: int = 64
    num_workers: int = 2
    throughput_batches: int = 10  # timed batches of the dense and the pruned model, in turn; 0 skips it

    def __post_init__(self) -> None:
        if self.num_images is not None:
            require_at_least("evaluation.num_images", self.num_images, 1)
        require_at_least("evaluation.batch_size", self.batch_size, 1)
        require_at_least("evaluation.num_workers", self.num_workers, 0)
        require_at_least("evaluation.throughput_batches", self.throughput_batches, 0)


@dataclass
class PruneConfig:
    """Everything `corp prune` can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    ranker: RankerConfig = field(default_factory=RankerConfig)
    compensation: CompensationConfig = field(default_factory=CompensationConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    recipe: str = "paper"
    seed: int = 0
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps

    def __post_init__(self) -> None:
        require_at_least("seed", self.seed, 0)


@dataclass
class InfoConfig:
    """Everything `corp info` can be told."""

    checkpoint: Optional[str] = None  # a pruned.safetensors

    def __post_init__(self) -> None:
        if self.checkpoint is None:
            raise CorpError("Say which checkpoint to describe: corp info checkpoint=path/to/pruned.safetensors")


SCHEMAS = {"prune": PruneConfig, "info": InfoConfig}


def config_dir() -> Path:
    """The folder of YAML configs: inside the installed package, or at the top of a source checkout."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs"


def slug(name: str) -> str:
    """`name` with everything but letters, digits, '.', '_' and '-' replaced, so that it can name a folder."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip(".") or "_"


def register() -> None:
    """Hand the schemas to Hydra's ConfigStore (`prune_schema`, `info_schema`) and `slug` to OmegaConf."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    OmegaConf.register_new_resolver("slug", slug, replace=True)


def load_config(*overrides: str) -> PruneConfig:
    """The config that `corp prune <overrides>` runs with; raises CorpError where that command would."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from corp_cli.cli_errors import plain_errors

    register()
    with (
        initialize_config_dir(config_dir=str(config_dir().resolve()), version_base="1.3"),
        plain_errors("prune", overrides, GlobalHydra.instance().config_loader()),
    ):
        return typed(compose(config_name="prune", overrides=list(overrides)), PruneConfig)


def typed(cfg: DictConfig, schema: type[Config]) -> Config:
    """`cfg` as the dataclass `schema`; its range checks, and keys that it does not know, raise CorpError."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(cfg)
    if not isinstance(config, schema):
        raise CorpError("This config does not build on corp's own; put prune first in its defaults list.")
    for key in forced_keys(config):
        raise CorpError(f"corp has no key {key}; leave it out, or see corp prune --help")
    return config


def forced_keys(config: Any, parent: str = "") -> Iterator[str]:
    """The dotted keys of `config` that are not in its schema: Hydra lets +key=value add anything."""
    known = {item.name for item in fields(config)}
    for name, value in vars(config).items():
        if name not in known:
            yield f"{parent}{name}"
        elif is_dataclass(value):
            yield from forced_keys(value, f"{parent}{name}.")
