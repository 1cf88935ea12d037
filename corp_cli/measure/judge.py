"""Fidelity of models to the dense one, their accuracy where labels exist, and their throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.measure.metrics import RunningFeatures, RunningMetrics
from corp_cli.measure.precision import autocast, by_onednn
from corp_cli.measure.results import Evaluation
from corp_cli.measure.timing import throughput


@dataclass(frozen=True)
class Findings:
    """Evaluations by model name, and images per second by model name for batches of `batch_size` (None: not timed)."""

    evaluations: dict[str, Evaluation]
    labelled_images: int
    batch_size: int
    images_per_second: dict[str, float] | None


Running = RunningMetrics | RunningFeatures


def running(model: nn.Module) -> Running:
    """What takes in the outputs of `model`: logits, or features where it has no classifier."""
    return RunningFeatures() if getattr(model, "num_classes", None) == 0 else RunningMetrics()


@torch.inference_mode()
def measure(
    models: dict[str, nn.Module],
    batches: Iterable[tuple[Tensor, Tensor]],
    reference: str | None = "dense",
    precision: str = "float32",
) -> dict[str, Running]:
    """All `models` in `precision` on the same batches in one pass, so that images are decoded once.

    Fidelity is to the model named `reference`, if any, in the same precision. Raises CorpError when outputs are not
    finite.
    """
    metrics = {name: running(model) for name, model in models.items()}
    for images, labels in batches:
        with autocast(images.device, precision), by_onednn(images.device):
            logits = {name: model(images).float().cpu() for name, model in models.items()}
        for name, found in metrics.items():
            if not logits[name].isfinite().all():
                narrow = " and evaluation.precision" if precision == "float16" else ""
                raise CorpError(
                    f"The {name} model gives NaN or infinite outputs on the evaluation images; check its weights and "
                    f"the preprocessing of the images{narrow}."
                )
            found.add(logits[name], labels, logits[reference] if reference else None)
    return metrics


def judge(
    models: dict[str, nn.Module],
    batches: Iterable[tuple[Tensor, Tensor]],
    probe: Tensor,
    repeats: int,
    precision: str = "float32",
    gathered: Callable[[dict[str, Running]], list[dict[str, Running]]] = lambda own: [own],
) -> Findings:
    """Fidelity and accuracy of all `models`; throughput of "dense" and "pruned" on `probe`: in `precision`.

    gathered: what came of the batches of other processes too, where there are several.
    """
    metrics, *others = gathered(measure(models, batches, precision=precision))
    for other in others:
        for name, found in metrics.items():
            found.join(other[name])
    timed = {name: models[name] for name in ("dense", "pruned")}
    return Findings(
        {name: found.result() for name, found in metrics.items()},
        metrics["dense"].labelled(),
        len(probe),
        throughput(timed, probe, repeats, precision) if repeats else None,
    )
