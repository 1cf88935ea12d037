"""What a page says of one run in words and cells: a sentence, the four numbers that tell most, and tables."""

from __future__ import annotations

from dataclasses import dataclass

from corp_cli.models.blocks import GROUPS
from corp_cli.report.card import MODELS, ROWS
from corp_cli.report.parts import Images
from corp_cli.report.runs import amount
from corp_cli.report.schema import Report
from corp_cli.runtime.console import duration


@dataclass(frozen=True)
class Number:
    """One of the numbers that a page begins with."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table that sorts: what is shown, and the number it is sorted by, if it is one."""

    text: str
    number: float | None = None


EMPTY = Cell("")


def gone(report: Report, what: str) -> float:
    """Percent of the parameters or the MACs that were removed."""
    return 100 * (1 - getattr(report.size.pruned, what) / getattr(report.size.dense, what))


def removed(report: Report, what: str) -> str:
    """The same with its sign."""
    return f"{-gone(report, what):+.1f}%".replace("-", "−")


def seconds(report: Report) -> float:
    """Wall time of the run."""
    return sum(report.stage_seconds.values())


def sentence(report: Report) -> str:
    """What happened."""
    name, pruned, dense = report.model.name, report.evaluation.pruned, report.evaluation.dense
    less = f"{name} with {gone(report, 'macs'):.1f}% fewer MACs"
    if pruned.top1 is not None and dense.top1 is not None:
        return f"{less} is right on {pruned.top1:.1f}% of the images; before, on {dense.top1:.1f}%"
    if pruned.agreement is not None:
        return f"{less} names the same class as before on {pruned.agreement:.1f}% of the images"
    if pruned.cosine is not None:
        return f"{less} gives features with a cosine of {pruned.cosine:.4f} to those before"
    return less


def numbers(report: Report) -> list[Number]:
    """The four that tell most."""
    pruned, dense, speed = report.evaluation.pruned, report.evaluation.dense, report.throughput
    found = [
        Number(
            label,
            amount(getattr(report.size.pruned, what)),
            f"{removed(report, what)} of {amount(getattr(report.size.dense, what))}",
        )
        for label, what in (("MACs of an image", "macs"), ("Parameters", "parameters"))
    ]
    if pruned.top1 is not None:
        change = "" if dense.top1 is None else f"{pruned.top1 - dense.top1:+.1f} points to the dense model"
        interval = pruned.top1_interval
        sure = f"; 95% interval {interval[0]:.1f} to {interval[1]:.1f}" if interval and len(interval) == 2 else ""
        found.append(Number("Top-1 accuracy", f"{pruned.top1:.1f}%", f"{change}{sure}".replace("-", "−")))
    elif pruned.agreement is not None:
        found.append(Number("Agreement", f"{pruned.agreement:.1f}%", "of the images get the dense model's class"))
    elif pruned.cosine is not None:
        found.append(Number("Cosine of features", f"{pruned.cosine:.4f}", "to those of the dense model"))
    if speed is not None:
        fast = speed.images_per_second.get("pruned", 0)
        found.append(
            Number("Speed", f"×{speed.speedup:.2f}", f"{fast:.0f} images/s, batch {speed.batch_size}; quick timing")
        )
    if pruned.kl is not None:
        found.append(Number("KL to the dense model", f"{pruned.kl:.3g}", "nats an image"))
    if pruned.cka is not None:
        found.append(Number("CKA of features", f"{pruned.cka:.4f}", "with those of the dense model"))
    found.append(Number("Time of the run", duration(seconds(report)), report.environment.device_name))
    return found[:4]


def went_in(report: Report) -> list[tuple[str, str]]:
    """The model and the images."""
    size = " × ".join(map(str, report.model.data.input_size))
    judged = report.evaluation
    labels = f"{judged.labelled_images} with labels" if judged.labelled_images else "no labels"
    held = "none calibrated on" if judged.held_out else "some calibrated on"
    return [
        ("model", f"{report.model.name} ({report.model.timm_name}), input {size}"),
        ("dense weights", f"sha256 {report.model.dense_sha256[:12]}…"),
        ("calibrated on", images(report.calibration)),
        ("judged on", f"{images(judged)}, {labels}, {held}"),
        ("seed", str(report.seed)),
    ]


def images(used: Images) -> str:
    """How many from where."""
    bad = f", {used.bad.count} more could not be read" if used.bad.count else ""
    return f"{used.images} images of {used.source}{bad}"


def results(report: Report) -> list[list[str]]:
    """Rows of what came out: label, dense, pruned, change, cut and not repaired."""
    rows = []
    for label, what in (("parameters", "parameters"), ("MACs of an image", "macs")):
        dense, pruned = (amount(getattr(one, what)) for one in (report.size.dense, report.size.pruned))
        rows.append([label, dense, pruned, removed(report, what), pruned])
    if report.throughput is not None:
        fast = report.throughput.images_per_second
        shown = [f"{fast[model]:.0f}" if model in fast else "" for model in ("dense", "pruned")]
        rows.append(["images/s", *shown, f"×{report.throughput.speedup:.2f}", ""])
    for label, key, form, to_dense in ROWS:
        dense, cut, pruned = (getattr(getattr(report.evaluation, model), key) for model in MODELS)
        if pruned is None:
            continue
        before = None if to_dense else dense
        change = "" if before is None else f"{pruned - before:+.2f}".replace("-", "−")
        rows.append([label, *("" if got is None else form.format(got) for got in (before, pruned)), change])
        rows[-1].append("" if cut is None else form.format(cut))
    return rows


def stages(report: Report) -> list[tuple[str, str, float]]:
    """(stage, its time, its share in percent)."""
    total = seconds(report) or 1
    return [(name, duration(taken), 100 * taken / total) for name, taken in report.stage_seconds.items()]


def block_table(report: Report) -> tuple[list[str], list[list[Cell]]]:
    """Headings and rows: sizes and errors of every block."""
    failed = [group for group in GROUPS if any(group in block.reconstruction_error for block in report.blocks)]
    merged = report.sparsity.merged_tokens or []
    headings = ["block", *(f"{group} kept" for group in GROUPS), *(["merged"] if merged else [])]
    headings += [f"{group} error" for group in failed] + [f"{group} repaired" for group in failed]
    rows = []
    for i, block in enumerate(report.blocks):
        row = [Cell(block.name, i)]
        for group in GROUPS:
            left, all_ = getattr(block.pruned, group), getattr(block.dense, group)
            row.append(Cell(f"{left} of {all_}" if left != all_ else f"{all_}", left) if all_ else EMPTY)
        if merged:
            row.append(Cell(str(merged[i]), merged[i]) if i < len(merged) else EMPTY)
        for when in ("before", "after"):
            for group in failed:
                error = block.reconstruction_error.get(group)
                row.append(Cell(f"{getattr(error, when):.2g}", getattr(error, when)) if error else EMPTY)
        rows.append(row)
    return headings, rows


def machine(report: Report) -> list[tuple[str, str]]:
    """What the figures depend on besides."""
    where, used = report.environment, report.peak_memory_mib
    memory = f"{used.host:.0f} MiB" + (f", on the device {used.device:.0f} MiB" if used.device else "")
    return [
        ("device", f"{where.device}, {where.device_name}"),
        ("threads", str(where.torch_threads)),
        ("peak memory", memory),
        ("platform", where.platform),
        ("versions", ", ".join(f"{package} {number}" for package, number in where.versions.items())),
        *([("commit", where.git_commit)] if where.git_commit else []),
    ]
