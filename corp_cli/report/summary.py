"""What a run says on the terminal when it is done."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from corp_cli.files.output import CHECKPOINT, PLAN, REPORT
from corp_cli.report.schema import Report
from corp_cli.runtime import console

FIDELITY = (
    ("agreement", "agreement", "{:.1f}%"),
    ("kl", "KL to dense", "{:.3g}"),
    ("cosine", "cosine to dense", "{:.4f}"),
    ("cka", "CKA with dense", "{:.4f}"),
)


def _change(dense: float, pruned: float, unit: float, suffix: str, digits: int) -> tuple[str, str, str]:
    change = f"{100 * (pruned / dense - 1):+.1f}%" if dense else ""
    return f"{dense / unit:.{digits}f}{suffix}", f"{pruned / unit:.{digits}f}{suffix}", change


def summary(report: Report) -> Table:
    """Dense against pruned: size, fidelity, accuracy and speed."""
    table = Table(title=f"{report.model.name}, {report.config['recipe']} recipe", title_justify="left")
    for column in ("", "dense", "pruned", "change"):
        table.add_column(column, justify="left" if column == "" else "right")
    dense, pruned = report.size.dense, report.size.pruned
    unit, suffix = (1e6, " M") if dense.parameters >= 1e6 else (1e3, " k")
    table.add_row("parameters", *_change(dense.parameters, pruned.parameters, unit, suffix, 2))
    unit, suffix = (1e9, " G") if dense.macs >= 1e8 else (1e6, " M")
    table.add_row("MACs", *_change(dense.macs, pruned.macs, unit, suffix, 3))
    if report.throughput:
        fast = report.throughput.images_per_second
        table.add_row("images/s", *_change(fast["dense"], fast["pruned"], 1, "", 0))
    before, after = report.evaluation.uncompensated, report.evaluation.pruned
    for key, label in (("top1", "top-1"), ("top5", "top-5"), ("knn_top1", "k-NN top-1")):
        base, cut, found = (getattr(one, key) for one in (report.evaluation.dense, before, after))
        if base is not None:
            table.add_row(label, f"{base:.1f}%", f"{found:.1f}%", f"{found - base:+.1f} (uncompensated {cut:.1f}%)")
    for key, label, form in FIDELITY:
        cut, found = getattr(before, key), getattr(after, key)
        if found is not None:
            table.add_row(label, "", form.format(found), f"(uncompensated {form.format(cut)})")
    return table


def show(report: Report, folder: Path) -> None:
    """The table, on which images it was measured, and one line that says where everything is."""
    out, seen = console.out(), report.evaluation
    out.print(summary(report))
    what = "accuracy and fidelity" if seen.labelled_images else "fidelity (no labels)"
    out.print(
        f"Calibrated on {report.calibration.images} images of {report.calibration.source}; "
        f"{what} on {seen.images} images of {seen.source}"
        f"{'' if seen.held_out else ', of which some were calibrated on'}.",
        markup=False,
    )
    for line in report.sparsity.skipped:
        console.warn(f"left alone: {line}")
    seconds = sum(report.stage_seconds.values())
    exported = "".join(f", {file.file}" for file in report.export or [])
    out.print(f"Wrote {CHECKPOINT}{exported}, {REPORT} and {PLAN} to {folder} in {seconds:.1f} s.", markup=False)
