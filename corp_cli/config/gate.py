"""The schema of `gate.*` and of `corp check`: what a result may cost. Imports neither torch nor timm.

`LimitsConfig` is the group `gate` of `corp prune`. `GateConfig` adds tolerances against a baseline, for `corp check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from corp_cli.config.ranges import require_at_least, require_fraction
from corp_cli.errors import CorpError

LIMIT = ("max_", "min_")  # how the names of limits begin


@dataclass
class LimitsConfig:
    """Limits of one result; None does not look at it."""

    max_top1_drop: Optional[float] = None  # percentage points below the dense model
    max_top5_drop: Optional[float] = None  # percentage points below the dense model
    min_agreement: Optional[float] = None  # percent of the images
    max_kl: Optional[float] = None  # nats per image
    min_macs_removed: Optional[float] = None  # fraction
    min_params_removed: Optional[float] = None  # fraction
    min_speedup: Optional[float] = None  # images per second, pruned over dense

    def __post_init__(self) -> None:
        require_at_least("gate.", self, **dict.fromkeys(vars(self), 0.0))
        require_fraction("gate.", self, "min_macs_removed", "min_params_removed")
        if self.min_agreement is not None and self.min_agreement > 100:
            raise CorpError(f"gate.min_agreement={self.min_agreement:g} is out of range; it must be at most 100.")

    def limits(self) -> dict[str, float]:
        """Name → value of the limits that are set."""
        return {name: value for name, value in vars(self).items() if value is not None and name.startswith(LIMIT)}


@dataclass
class GateConfig(LimitsConfig):
    """Limits, and how much worse than the baseline a result may be; None does not compare. See gate/default.yaml."""

    top1_drop: Optional[float] = None  # percentage points
    top5_drop: Optional[float] = None  # percentage points
    agreement_drop: Optional[float] = None  # percentage points
    kl: Optional[float] = None  # nats per image
    macs: Optional[float] = None  # relative
    params: Optional[float] = None  # relative
    throughput: Optional[float] = None  # relative; times are only compared on one machine
    speedup: Optional[float] = None  # relative; the same

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("gate.", self, "throughput", "speedup")

    def tolerances(self) -> dict[str, float]:
        """Name → value of the tolerances that are set."""
        return {name: value for name, value in vars(self).items() if value is not None and not name.startswith(LIMIT)}


@dataclass
class CheckConfig:
    """Everything `corp check` can be told."""

    report: Optional[str] = None  # a report.json or an evaluation.json
    against: Optional[str] = None  # another, which it must not be worse than
    junit: Optional[str] = None  # a file for the result as JUnit XML
    markdown: Optional[str] = None  # a file for the result as Markdown
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        if self.report is None:
            raise CorpError("Say which report to check: corp check report.json --against baseline.json")
        if self.against is None and not self.gate.limits():
            raise CorpError(
                "There is nothing to check; give a baseline with --against baseline.json, or a limit such as "
                "gate.max_top1_drop=2."
            )
        if not self.gate.limits() and not self.gate.tolerances():
            raise CorpError(
                "There is nothing to check, since all of gate.* is null; give a tolerance such as gate.top1_drop=0.5."
            )
