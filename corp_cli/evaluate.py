"""Fidelity of models to the dense one, their accuracy where labels exist, and their throughput."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Evaluation:
    """One model on one set of images; agreement, top-1 and top-5 in percent, KL in nats per image."""

    agreement: float  # same top-1 class as the dense model
    kl: float  # KL(dense ‖ model) of the class probabilities
    top1: float | None = None
    top5: float | None = None


@dataclass
class _Sums:
    images: int = 0
    labelled: int = 0
    agree: int = 0
    kl: float = 0.0
    top1: int = 0
    top5: int = 0

    def add(self, logits: Tensor, dense: Tensor, labels: Tensor) -> None:
        p, q = (F.log_softmax(t.double(), dim=-1) for t in (dense, logits))
        self.images += len(logits)
        self.agree += int((logits.argmax(-1) == dense.argmax(-1)).sum())
        self.kl += float(F.kl_div(q, p, reduction="sum", log_target=True))
        known = labels >= 0
        self.labelled += int(known.sum())
        hits = logits.topk(min(5, logits.shape[-1])).indices[known] == labels[known, None]
        self.top1 += int(hits[:, 0].sum())
        self.top5 += int(hits.sum())

    def result(self) -> Evaluation:
        def percent(hits: int, of: int) -> float:
            return 100 * hits / of

        labelled = self.labelled > 0
        return Evaluation(
            percent(self.agree, self.images),
            max(0.0, self.kl / self.images),
            percent(self.top1, self.labelled) if labelled else None,
            percent(self.top5, self.labelled) if labelled else None,
        )


@dataclass(frozen=True)
class Findings:
    """Evaluations by model name, and images per second by model name for batches of `batch_size` (None: not timed)."""

    evaluations: dict[str, Evaluation]
    batch_size: int
    images_per_second: dict[str, float] | None


@torch.inference_mode()
def evaluate(models: dict[str, nn.Module], batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Evaluation]:
    """All `models` judged on the same batches in one pass, so that images are decoded once.

    Fidelity is to the model named "dense". Raises CorpError when outputs are not finite.
    """
    sums = {name: _Sums() for name in models}
    for images, labels in batches:
        logits = {name: model(images) for name, model in models.items()}
        for name, total in sums.items():
            total.add(logits[name], logits["dense"], labels)
    return {name: total.result() for name, total in sums.items()}


@torch.inference_mode()
def throughput(models: dict[str, nn.Module], images: Tensor, repeats: int) -> dict[str, float]:
    """Images per second of every model: the median over `repeats` forward passes, the models taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeats + 1):
        for name, model in models.items():
            synchronize(images.device)
            start = time.perf_counter()
            model(images)
            synchronize(images.device)
            if turn > 0:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: len(images) / median(times) for name, times in seconds.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def judge(
    models: dict[str, nn.Module], batches: Iterable[tuple[Tensor, Tensor]], probe: Tensor, repeats: int
) -> Findings:
    """Fidelity and accuracy of all `models`; throughput of "dense" and "pruned" on the batch `probe`."""
    evaluations = evaluate(models, batches)
    timed = {name: models[name] for name in ("dense", "pruned")}
    return Findings(evaluations, len(probe), throughput(timed, probe, repeats) if repeats else None)
