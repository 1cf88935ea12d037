"""The number that a sweeper goes by, out of a report."""

from __future__ import annotations

from corp_cli.report.schema import Report


def value_of(report: Report, names: list[str]) -> float | tuple[float, ...] | None:
    """The figures of the pruned model that `names` ask for: one as it is, two as a tuple; None for none.

    top1 and agreement in percent, KL in nats per image, MACs of one image, and latency in milliseconds per image.
    """
    found = report.evaluation.pruned
    figures = {
        "top1": found.top1,
        "agreement": found.agreement,
        "kl": found.kl,
        "macs": report.size.pruned.macs,
        "parameters": report.size.pruned.parameters,
        "latency": 1000 / report.throughput.images_per_second["pruned"] if report.throughput else None,
    }
    values = []
    for name in names:
        figure = figures[name]
        assert figure is not None, name  # what is not measured is refused before the run
        values.append(float(figure))
    return values[0] if len(values) == 1 else tuple(values) or None
