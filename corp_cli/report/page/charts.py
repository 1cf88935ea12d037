"""What the charts of a page draw, as JSON for page.js: lists of numbers, axes in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corp_cli.models.blocks import GROUPS
from corp_cli.report.schema import DamageCurve, Report

TITLES = {  # group → title of its charts, what its units are
    "mlp": ("MLP", "hidden channels"),
    "qk": ("Queries and keys", "dimensions a head"),
    "vo": ("Values and outputs", "dimensions a head"),
    "heads": ("Heads", "heads"),
    "tokens": ("Merged tokens", "tokens"),
}
DECADES = 6  # of damage that a chart shows below the largest


@dataclass(frozen=True)
class Measure:
    """What runs are compared by, on the evaluation images."""

    key: str  # of Evaluation
    short: str
    label: str
    form: str
    lower: bool = False  # is better; then a logarithmic axis
    near: float = 0.0  # so far from the dense model is near it


MEASURES = (
    Measure("top1", "top-1", "top-1", "{:.1f}%", near=1),
    Measure("agreement", "agreement", "agreement with the dense model", "{:.1f}%", near=1),
    Measure("kl", "KL", "KL to the dense model, nats", "{:.3g}", lower=True),
    Measure("cosine", "cosine", "cosine to the dense model's features", "{:.4f}", near=0.01),
    Measure("cka", "CKA", "CKA with the dense model's features", "{:.4f}", near=0.01),
    Measure("knn_top1", "k-NN top-1", "k-NN top-1", "{:.1f}%", near=1),
)


def value(report: Report, measure: Measure, model: str = "pruned") -> float | None:
    """What was measured of one of the three models of a run."""
    found: float | None = getattr(getattr(report.evaluation, model), measure.key)
    return found


def measures(reports: Sequence[Report]) -> list[Measure]:
    """Those that some run has, those that all have first."""
    has = {one: sum(value(report, one) is not None for report in reports) for one in MEASURES}
    return sorted((one for one in MEASURES if has[one]), key=lambda one: has[one] < len(reports))


def front(reports: Sequence[Report], measure: Measure) -> list[int]:
    """The runs that no other beats: none has as few MACs or fewer and is better. By MACs; of equal runs the first."""
    sign, found, best = -1 if measure.lower else 1, [], -math.inf
    points = [
        (report.size.pruned.macs, -sign * got, i)
        for i, report in enumerate(reports)
        if (got := value(report, measure)) is not None
    ]
    for _, worse, i in sorted(points):
        if -worse > best:
            best = -worse
            found.append(i)
    return found


def trade(reports: Sequence[Report], measure: Measure) -> dict[str, Any]:
    """Accuracy or fidelity against MACs: every run, the front, the dense models; one run also unrepaired."""

    def point(report: Report, model: str) -> tuple[int, float] | None:
        size, got = report.size.dense if model == "dense" else report.size.pruned, value(report, measure, model)
        return None if got is None else (size.macs, got)

    return {
        "label": measure.label,
        "axis": f"{measure.label}, %" if measure.form.endswith("%") else measure.label,
        "log": measure.lower,
        "runs": [point(report, "pruned") for report in reports],
        "front": front(reports, measure),
        "dense": sorted({got for report in reports if (got := point(report, "dense"))}),
        "cut": [got for report in reports if len(reports) == 1 and (got := point(report, "uncompensated"))],
    }


def short_names(report: Report) -> dict[str, str]:
    """name of a block → its numbers, if they tell the blocks apart: blocks.3 is 3, layers.0.blocks.1 is 0.1."""
    names = [block.name for block in report.blocks]
    numbered = {name: ".".join(part for part in name.split(".") if part.isdigit()) or name for name in names}
    return numbered if len({*numbered.values()}) == len(names) else {name: name for name in names}


def cut_groups(report: Report) -> list[str]:
    """The groups of which some block has lost units."""
    return [
        group
        for group in GROUPS
        if any(getattr(block.dense, group) != getattr(block.pruned, group) for block in report.blocks)
    ]


def details(report: Report) -> dict[str, Any]:
    """The charts of one run: sizes, errors and damage by group."""
    return {
        "blocks": list(short_names(report).values()),
        "sizes": list(sizes(report)),
        "errors": list(errors(report)),
        "curves": list(curves(report)),
    }


def sizes(report: Report) -> Iterator[dict[str, Any]]:
    """What is kept and what is gone of every block, of each group that was cut; and how many tokens were merged."""
    for group in cut_groups(report):
        kept = [getattr(block.pruned, group) for block in report.blocks]
        gone = [getattr(block.dense, group) - left for block, left in zip(report.blocks, kept, strict=True)]
        yield {"group": group, "title": TITLES[group][0], "unit": TITLES[group][1], "kept": kept, "gone": gone}
    if report.sparsity.merged_tokens:
        title, unit = TITLES["tokens"]
        yield {"group": "tokens", "title": title, "unit": unit, "kept": report.sparsity.merged_tokens, "gone": None}


def errors(report: Report) -> Iterator[dict[str, Any]]:
    """Error of every block before and after the repair, by group."""
    for group in GROUPS:
        found = [block.reconstruction_error.get(group) for block in report.blocks]
        found = [one if one and one.before > 0 else None for one in found]  # else it has lost nothing
        if any(found):
            before, after = ([one and brief(getattr(one, when)) for one in found] for when in ("before", "after"))
            yield {"group": group, "title": TITLES[group][0], "before": before, "after": after}


def curves(report: Report) -> Iterator[dict[str, Any]]:
    """Damage curves by group, over the share of units kept, with the size that was chosen; one scale for all."""
    names, blocks = short_names(report), {block.name: i for i, block in enumerate(report.blocks)}
    drawn = [one for one in report.sparsity.curves if one.block in blocks and len(one.sizes) == len(one.damage) > 1]
    top = max((max(one.damage) for one in drawn), default=0)
    floor = top * 10.0**-DECADES
    for group in TITLES if top > 0 else ():
        lines = []
        for one in (one for one in drawn if one.group == group):
            dense, chosen = one.sizes[-1] or 1, chosen_size(report, one, blocks[one.block])
            at = float(np.interp(float(chosen), [float(size) for size in one.sizes], one.damage))
            points = [
                [brief(100 * size / dense), brief(max(found, floor / 10))]
                for size, found in zip(one.sizes, one.damage, strict=True)
            ]
            lines.append(
                {
                    "block": names[one.block],
                    "points": points,
                    "chosen": [brief(100 * chosen / dense), brief(max(at, floor))],
                    "said": f"{chosen} of {dense}",
                }
            )
        if lines:
            title, unit = TITLES[group]
            yield {"group": group, "title": title, "unit": unit, "floor": floor, "top": top, "lines": lines}


def chosen_size(report: Report, curve: DamageCurve, block: int) -> int:
    """How many units the run kept of what `curve` is of."""
    if curve.group in GROUPS:
        kept: int = getattr(report.blocks[block].pruned, curve.group)
        return kept
    merged = report.sparsity.merged_tokens or []
    return curve.sizes[-1] - (merged[block] if block < len(merged) else 0)


def brief(number: float) -> float:
    """`number` with the digits that can be seen."""
    return float(f"{number:.4g}")
