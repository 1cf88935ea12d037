"""What a run says on the terminal when it is done."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rich.table import Table

from corp_cli.files.output import CHECKPOINT, PAGE, PLAN, REPORT
from corp_cli.report.schema import Report
from corp_cli.runtime import console

COLUMNS = ("", "dense", "pruned", "change")
FIDELITY = (
    ("agreement", "agreement", "{:.1f}%"),
    ("kl", "KL to dense", "{:.3g}"),
    ("cosine", "cosine to dense", "{:.4f}"),
    ("cka", "CKA with dense", "{:.4f}"),
)


def _change(dense: float, pruned: float, unit: float, suffix: str, digits: int) -> tuple[str, str, str]:
    change = f"{100 * (pruned / dense - 1):+.1f}%" if dense else ""
    return f"{dense / unit:.{digits}f}{suffix}", f"{pruned / unit:.{digits}f}{suffix}", change


def summary_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """(what, dense, pruned, change): size, speed, accuracy and fidelity, as far as they were measured."""
    dense, pruned = report.size.dense, report.size.pruned
    unit, suffix = (1e6, " M") if dense.parameters >= 1e6 else (1e3, " k")
    rows = [("parameters", *_change(dense.parameters, pruned.parameters, unit, suffix, 2))]
    unit, suffix = (1e9, " G") if dense.macs >= 1e8 else (1e6, " M")
    rows.append(("MACs", *_change(dense.macs, pruned.macs, unit, suffix, 3)))
    if report.throughput:
        fast = report.throughput.images_per_second
        rows.append(("images/s", *_change(fast["dense"], fast["pruned"], 1, "", 0)))
    before, after = report.evaluation.uncompensated, report.evaluation.pruned
    for key, label in (("top1", "top-1"), ("top5", "top-5"), ("knn_top1", "k-NN top-1")):
        base, cut, found = (getattr(one, key) for one in (report.evaluation.dense, before, after))
        if base is not None:
            rows.append((label, f"{base:.1f}%", f"{found:.1f}%", f"{found - base:+.1f} (uncompensated {cut:.1f}%)"))
    for key, label, form in FIDELITY:
        cut, found = getattr(before, key), getattr(after, key)
        if found is not None:
            rows.append((label, "", form.format(found), f"(uncompensated {form.format(cut)})"))
    return rows


def summary(report: Report) -> Table:
    """Dense against pruned: size, fidelity, accuracy and speed."""
    table = Table(title=f"{report.model.name}, {report.config['recipe']} recipe", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "" else "right")
    for row in summary_rows(report):
        table.add_row(*row)
    return table


def summary_html(report: Report) -> str:
    """The same table for a notebook, with the images that it was measured on."""
    title = f"{report.model.name}, {report.config['recipe']} recipe"
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in summary_rows(report))
    return (
        f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<p>{escape(images_used(report))}</p>"
    )


def brief(report: Report) -> str:
    """The model, its size before and after, and what was measured of its fidelity, in one line."""
    removed, found = report.size.removed_percent, report.evaluation.pruned
    rows = {label: (dense, pruned) for label, dense, pruned, _ in summary_rows(report)}
    parts = [
        f"parameters {' → '.join(rows['parameters'])} (-{removed.parameters:.1f}%)",
        f"MACs {' → '.join(rows['MACs'])} (-{removed.macs:.1f}%)",
    ]
    if found.top1 is not None:
        parts.append(f"top-1 {' → '.join(rows['top-1'])}")
    parts += [f"{label} {rows[label][1]}" for label in ("KL to dense", "cosine to dense") if label in rows]
    return f"{report.model.name}: {', '.join(parts)}"


def images_used(report: Report) -> str:
    """On which images the figures were measured."""
    seen = report.evaluation
    what = "accuracy and fidelity" if seen.labelled_images else "fidelity (no labels)"
    return (
        f"Calibrated on {report.calibration.images} images of {report.calibration.source}; "
        f"{what} on {seen.images} images of {seen.source}"
        f"{'' if seen.held_out else ', of which some were calibrated on'}."
    )


def show(report: Report, folder: Path) -> None:
    """The table, on which images it was measured, and one line that says where everything is."""
    out = console.out()
    out.print(summary(report))
    out.print(images_used(report), markup=False)
    for line in report.sparsity.skipped:
        console.warn(f"left alone: {line}")
    seconds = sum(report.stage_seconds.values())
    exported = "".join(f", {name}" for file in report.export or [] for name in file.names())
    out.print(
        f"Wrote {CHECKPOINT}{exported}, {REPORT}, {PAGE} and {PLAN} to {folder} in {seconds:.1f} s.", markup=False
    )
