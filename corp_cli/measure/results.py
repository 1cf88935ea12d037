"""What is measured of models and files, as it stands in the reports; docs/report.md explains it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """One model on one set of images; percentages in [0, 100], KL and loss in nats per image.

    Fidelity is None without a reference, the rest None without labels. A model without a classifier has the last three
    in place of the others (RunningFeatures of corp_cli.measure.metrics).
    """

    agreement: float | None  # same top-1 class as the reference
    kl: float | None  # KL(reference ‖ model) of the class probabilities
    top1: float | None = None
    top1_interval: tuple[float, float] | None = None  # Wilson's, 95%
    top5: float | None = None
    top5_interval: tuple[float, float] | None = None
    loss: float | None = None  # cross entropy
    calibration_error: float | None = None  # expected |confidence - accuracy| over 15 bins of confidence, percent
    cosine: float | None = None  # mean cosine of the features to the reference's
    cka: float | None = None  # linear CKA with the reference's features
    knn_top1: float | None = None  # leave-one-out k-NN among the labelled images


@dataclass(frozen=True)
class Difference:
    """How far the logits of one way to run a file are from the PyTorch model's."""

    max_abs_diff: float  # of any logit on any image


@dataclass(frozen=True)
class Parity(Evaluation, Difference):
    """One way to run a file; its reference is the PyTorch model in float32 on the same images."""


@dataclass(frozen=True)
class File:
    """A file, or a folder, for another runtime."""

    file: str
    weights: str | None  # the file that holds them, where it is another
    format: str
    dtype: str
    quantisation: str | None
    opset: int | None
    bytes: int
    parity: dict[str, Parity]  # by what optimised it before it ran

    def names(self) -> list[str]:
        """Of all that was written."""
        return [self.file, *([self.weights] if self.weights else [])]


@dataclass(frozen=True)
class Count:
    """Size of a model."""

    parameters: int
    macs: int  # of one image
    flops: int  # 2 x MACs
