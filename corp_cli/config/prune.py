"""The schema of `corp prune`: typed dataclasses with range checks. Imports neither torch nor timm.

Each dataclass is one config group, or all of a command. compose.py hands them to Hydra, so that unknown keys and wrong
types are refused by name before any work begins. Values are checked in `__post_init__`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional

from corp_cli.config.export import ExportOptions
from corp_cli.config.gate import LimitsConfig
from corp_cli.config.images import DTYPES, CalibrationConfig, DataConfig, EvaluationConfig
from corp_cli.config.outcome import require_outcome
from corp_cli.config.ranges import require_at_least, require_choice, require_fraction
from corp_cli.errors import CorpError

SIMPLE_RANKERS = ("activation", "magnitude", "random")
RANKERS = {
    "mlp": (*SIMPLE_RANKERS, "variance", "obs", "kcm", "output", "optin"),
    "qk": SIMPLE_RANKERS,
    "vo": SIMPLE_RANKERS,
    "heads": (*SIMPLE_RANKERS, "output", "optin"),
}
COMPENSATIONS = {
    "mlp": ("none", "mean", "scale", "affine", "gauss_newton"),
    "qk": ("none", "sylvester", "lowrank", "weighted_lowrank"),
    "vo": ("none", "mean", "scale", "affine", "lowrank", "reduced_rank"),
    "propagate": ("none", "sequential"),
    "token_weights": ("uniform", "class_token", "rollout"),
}
BUDGETS = ("macs", "params", "latency")
SEARCHES = {"damage": ("mlp", "qk", "vo"), "scores": ("mlp", "heads")}  # how a budget chooses sizes → of which groups
DEFAULT_RIDGE = 0.1


@dataclass
class ModelConfig:
    """Which dense model to prune and where its weights come from."""

    name: str = "vit_digits"  # a bundled model, a timm name, hf-hub:owner/name or transformers:FOLDER
    pretrained: bool = True  # weights from timm or the hub, unless `checkpoint` is given
    checkpoint: Optional[str] = None  # .safetensors, .pth or .bin of the same architecture
    args: Dict[str, Any] = field(default_factory=dict)  # passed to timm.create_model


@dataclass
class SparsityConfig:
    """Fraction of each group to remove, in [0, 1). `joint=s` means mlp=s and qk=s (the paper's "Both").

    What is removed when nothing is named depends on the model: see `prepare.work.settled`.
    """

    joint: Optional[float] = None  # short for mlp and qk
    mlp: Optional[float] = None  # hidden channels
    qk: Optional[float] = None  # query/key dimensions of every head
    vo: Optional[float] = None  # value/output dimensions of every head
    heads: Optional[float] = None  # whole heads
    macs: Optional[float] = None  # budget: fraction of all MACs to remove, sizes chosen by measured damage
    params: Optional[float] = None  # budget: fraction of all parameters to remove
    latency: Optional[float] = None  # budget: fraction of the time of a forward pass to remove, measured here
    latency_batch_size: int = 32  # latency: images in the forward pass that is timed
    latency_dtype: str = "float32"  # latency: of the weights and images that are timed
    plan: Optional[str] = None  # a plan.yaml with the sizes of every block
    search: str = "damage"  # budget: sizes by measured damage; or scores: the units that score highest in all blocks
    rounds: int = 1  # budget: how often damage is measured, each time in the context of the sizes found before
    curve_images: int = 128  # budget: calibration images that damage is measured on
    round_to: Any = 8  # kept sizes are multiples of this, never above dense; or auto, what the device is fast with
    skip_unread: Optional[bool] = None  # exact: the last block leaves tokens alone that the head never reads
    merge_tokens: Optional[bool] = None  # budget for MACs or latency: merge similar tokens where that does less damage
    skip_unsupported: bool = False  # leave groups alone that a model's layers do not allow, and report them

    def __post_init__(self) -> None:
        for key in ("joint", *RANKERS, *BUDGETS):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value < 1.0:
                raise CorpError(
                    f"sparsity.{key}={value:g} is out of range; it is the fraction to remove, at least 0 and below 1."
                )
        if self.joint is not None and (self.mlp is not None or self.qk is not None):
            raise CorpError("sparsity.joint sets both sparsity.mlp and sparsity.qk; give joint alone or mlp and qk.")
        chosen = [key for key in (*BUDGETS, "plan") if getattr(self, key) is not None]
        fixed = [key for key in ("joint", "mlp", "qk", "vo") if getattr(self, key) is not None]
        if len(chosen) > 1:
            raise CorpError(f"sparsity.{chosen[0]} and sparsity.{chosen[1]} both choose the sizes; give one of them.")
        if chosen and fixed:
            raise CorpError(f"sparsity.{chosen[0]} chooses the sizes that sparsity.{fixed[0]} fixes; give one of them.")
        require_at_least("sparsity.", self, rounds=1, curve_images=1, latency_batch_size=1)
        self._require_step()
        require_choice("sparsity.", self, latency_dtype=DTYPES, search=tuple(SEARCHES))
        if self.search == "scores":
            self._require_searchable()

    def _require_step(self) -> None:
        if self.round_to == "auto":
            return
        if type(self.round_to) is not int:
            raise CorpError(f"sparsity.round_to={self.round_to} is not a number; give one, such as 8, or auto.")
        require_at_least("sparsity.", self, round_to=1)

    def _require_searchable(self) -> None:
        if self.latency is not None:
            raise CorpError("sparsity.search=scores knows no time; give sparsity.macs or sparsity.params.")
        if self.budget() and self.heads is not None:
            raise CorpError("sparsity.search=scores chooses heads as well; leave out sparsity.heads.")

    def groups(self) -> frozenset[str]:
        """The groups that may be pruned."""
        if self.plan is not None:
            return frozenset(RANKERS)
        named = {group for group, fraction in self.fractions().items() if fraction > 0}
        return frozenset(named | set(SEARCHES[self.search]) if self.budget() else named)

    def named(self) -> bool:
        """Whether anything says what to remove."""
        return any(getattr(self, key) is not None for key in ("joint", *RANKERS, *BUDGETS, "plan"))

    def chooses_sizes(self) -> bool:
        """Whether sizes differ by block, and groups that a block does not allow are simply left alone."""
        return self.plan is not None or self.budget() is not None

    def budget(self) -> str | None:
        """Which budget is set: macs, params or latency."""
        return next((key for key in BUDGETS if getattr(self, key) is not None), None)

    def fractions(self) -> dict[str, float]:
        """group → fraction to remove, for the groups mlp, qk, vo and heads."""
        given = {group: getattr(self, group) for group in RANKERS}
        if self.joint is not None:
            given.update(mlp=self.joint, qk=self.joint)
        return {group: value or 0.0 for group, value in given.items()}


@dataclass
class RankerConfig:
    """How the units of each group are scored (higher = keep)."""

    mlp: str = "obs"
    qk: str = "activation"
    vo: str = "activation"
    heads: str = "activation"
    optin_images: int = 64  # optin: calibration images that every masked model sees
    optin_lambda: float = 1.0  # optin: weight of the KL of the outputs beside the relations of tokens

    def __post_init__(self) -> None:
        require_choice("ranker.", self, **RANKERS)
        require_at_least("ranker.", self, optin_images=1, optin_lambda=0)

    def measured(self) -> frozenset[str]:
        """The groups whose units are masked one by one to score them."""
        return frozenset(group for group in RANKERS if getattr(self, group) == "optin")


@dataclass
class CompensationConfig:
    """How the damage to each group is repaired in closed form."""

    mlp: str = "gauss_newton"  # affine (Eq. 8-11, folded into fc2), then fc1 and fc2 refitted to tokens
    qk: str = "weighted_lowrank"  # or sylvester: Eq. 13-16; folded into the query and key projections
    vo: str = "reduced_rank"  # lowrank, then values and proj refitted; or affine: Eq. 8-11 on the head outputs
    ridge_lambda: Optional[float] = None  # relative to the mean diagonal of the covariance; None: see `ridge`
    propagate: str = "sequential"  # repair block by block on the stream of the blocks before; or none
    alpha: float = 0.2  # sequential: share of a branch's own error to undo
    beta: float = 0.4  # sequential: share of the stream's error to undo
    token_weights: str = "rollout"  # sequential: how often each token counts
    class_token_weight: float = 20.0  # class_token: how often tokens that the head reads count
    token_floor: float = 0.5  # rollout: share of the weight that is spread evenly over all tokens
    fit_tokens: int = 65536  # gauss_newton, reduced_rank: how many tokens a layer is refitted to

    def __post_init__(self) -> None:
        require_choice("compensation.", self, **COMPENSATIONS)
        require_at_least("compensation.", self, ridge_lambda=0, class_token_weight=0, fit_tokens=1)
        require_fraction("compensation.", self, "alpha", "beta", "token_floor")

    @property
    def weighs_logits(self) -> bool:
        """Whether logits are fitted by what attention makes of them."""
        return self.qk == "weighted_lowrank"

    @property
    def refits(self) -> bool:
        """Whether layers are refitted to tokens, after they were compensated in closed form."""
        return self.mlp == "gauss_newton" or self.vo == "reduced_rank"

    @property
    def ridge(self) -> float:
        """`ridge_lambda`, or what is taken for it where no images are kept aside to choose it by."""
        return DEFAULT_RIDGE if self.ridge_lambda is None else self.ridge_lambda


@dataclass
class PruneConfig:
    """Everything `corp prune` can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    ranker: RankerConfig = field(default_factory=RankerConfig)
    compensation: CompensationConfig = field(default_factory=CompensationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    gate: LimitsConfig = field(default_factory=LimitsConfig)
    export: ExportOptions = field(default_factory=ExportOptions)
    recipe: str = "best"  # the name of the choices above, for the report
    seed: int = 0
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    objective: Any = None  # what the command returns to a sweeper of Hydra: one name of OBJECTIVES, or a list of two
    track: Any = "none"  # where figures go besides the report: one name of TRACKERS, or a list
    dry_run: bool = False  # of the command: say what would be done, and write nothing

    def __post_init__(self) -> None:
        require_at_least("", self, seed=0)
        require_outcome(self.objective, self.track, timed=self.evaluation.throughput_batches > 0)
        if self.gate.min_speedup is not None and self.evaluation.throughput_batches == 0:
            raise CorpError(
                "gate.min_speedup needs a timing, which evaluation.throughput_batches=0 leaves out; set it above 0."
            )
