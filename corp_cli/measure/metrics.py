"""What is measured of a model's logits or, without a classifier, features: fidelity and, with labels, accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from corp_cli.linalg.similarity import knn_hits, linear_cka
from corp_cli.measure.results import Evaluation

BINS = 15  # of confidence, for the calibration error


@dataclass(frozen=True)
class ClassResult:
    """The labelled images of one class, and how many of them were right at the first and among five guesses."""

    index: int
    images: int
    top1: int
    top5: int


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95% interval of Wilson (1927) for a share p of `hits` in n = `of`, in percent.

    (p + z²/2n ± z (p(1-p)/n + z²/4n²)^½) / (1 + z²/n)
    """
    share, square = hits / of, NormalDist().inv_cdf(0.975) ** 2 / of  # p and z²/n
    half = (square * (share * (1 - share) + square / 4)) ** 0.5
    low, high = ((share + square / 2 + side * half) / (1 + square) for side in (-1, 1))
    return 100 * min(share, max(0.0, low)), 100 * max(share, min(1.0, high))


class RunningMetrics:
    """Sums behind one Evaluation; memory independent of the number of images."""

    def __init__(self) -> None:
        self.images = self.agree = 0
        self.has_reference = False
        self.kl = self.loss = 0.0
        self.bin_gap = torch.zeros(BINS, dtype=torch.float64)  # Σ (confidence - right) of the images in each bin
        self.by_class = torch.zeros(3, 0, dtype=torch.int64)  # images, top-1 hits, top-5 hits of every class

    def add(self, logits: Tensor, labels: Tensor, reference: Tensor | None) -> None:
        """Take in logits [B, C], labels [B] (-1: none) and, where there is one, the reference's logits [B, C].

        labels may be [B, L], filled up with -1, where any of several classes is right.
        """
        logits, labels = logits.cpu().double(), labels.cpu().reshape(len(labels), -1)
        self.images += len(logits)
        if reference is not None:
            reference = reference.cpu().double()
            p, q = (F.log_softmax(t, dim=-1) for t in (reference, logits))
            self.has_reference = True
            self.agree += int((logits.argmax(-1) == reference.argmax(-1)).sum())
            self.kl += float(F.kl_div(q, p, reduction="sum", log_target=True))
        if not len(self.by_class[0]):
            self.by_class = self.by_class.new_zeros(3, logits.shape[-1])
        known = labels[:, 0] >= 0
        if known.any():
            self._add_labelled(logits[known], labels[known])

    def join(self, other: Any) -> None:
        """Take in what another one has taken in."""
        self.images, self.agree = self.images + other.images, self.agree + other.agree
        self.has_reference = self.has_reference or other.has_reference
        self.kl, self.loss, self.bin_gap = self.kl + other.kl, self.loss + other.loss, self.bin_gap + other.bin_gap
        if other.images:
            self.by_class = other.by_class + (self.by_class if self.by_class.numel() else 0)

    def _add_labelled(self, logits: Tensor, labels: Tensor) -> None:
        right_classes = F.log_softmax(logits, dim=-1).gather(1, labels.clamp(min=0)).masked_fill(labels < 0, -torch.inf)
        self.loss -= float(right_classes.logsumexp(1).sum())
        guesses = logits.topk(min(5, logits.shape[-1])).indices
        hits = (guesses[:, :, None] == labels[:, None, :]).any(-1)
        first = labels[:, 0]
        right = torch.stack([torch.ones_like(first), hits[:, 0].long(), hits.any(1).long()])
        self.by_class.index_add_(1, first, right)
        confidence = logits.softmax(-1).amax(-1)
        bins = (confidence * BINS).long().clamp(max=BINS - 1)
        self.bin_gap.index_add_(0, bins, confidence - hits[:, 0].double())

    def result(self) -> Evaluation:
        """The metrics of everything taken in."""
        fidelity: tuple[float | None, float | None] = (None, None)
        if self.has_reference:
            fidelity = 100 * self.agree / self.images, max(0.0, self.kl / self.images)
        labelled, top1, top5 = (int(n) for n in self.by_class.sum(1))
        if labelled == 0:
            return Evaluation(*fidelity)
        return Evaluation(
            *fidelity,
            100 * top1 / labelled,
            wilson(top1, labelled),
            100 * top5 / labelled,
            wilson(top5, labelled),
            self.loss / labelled,
            100 * float(self.bin_gap.abs().sum()) / labelled,
        )

    def labelled(self) -> int:
        """How many images had a label."""
        return int(self.by_class[0].sum())

    def per_class(self) -> list[ClassResult]:
        """The classes of which there were images, in order of index."""
        columns = enumerate(self.by_class.T.tolist())
        return [ClassResult(index, *counts) for index, counts in columns if counts[0] > 0]


class RunningFeatures:
    """The features behind one Evaluation, kept on the host: linear CKA and k-NN compare all images with all others."""

    def __init__(self) -> None:
        self.features: list[Tensor] = []
        self.references: list[Tensor] = []
        self.labels: list[Tensor] = []

    def add(self, features: Tensor, labels: Tensor, reference: Tensor | None) -> None:
        """Take in features [B, ...], labels [B] (-1: none) and, where there is one, the reference's features.

        Of labels [B, L] the first counts.
        """
        self.features.append(features.cpu().flatten(1).float())
        self.labels.append(labels.cpu().reshape(len(labels), -1)[:, 0])
        if reference is not None:
            self.references.append(reference.cpu().flatten(1).float())

    def join(self, other: Any) -> None:
        """Take in what another one has taken in."""
        self.features += other.features
        self.references += other.references
        self.labels += other.labels

    def result(self) -> Evaluation:
        """The metrics of everything taken in."""
        features, labels = torch.cat(self.features), torch.cat(self.labels)
        cosine = cka = knn = None
        if self.references:
            reference = torch.cat(self.references)
            cosine = min(1.0, float(F.cosine_similarity(features, reference).double().mean()))
            cka = linear_cka(features, reference)
        known = labels >= 0
        if int(known.sum()) > 1:
            knn = 100 * knn_hits(features[known], labels[known]) / int(known.sum())
        return Evaluation(None, None, cosine=cosine, cka=cka, knn_top1=knn)

    def labelled(self) -> int:
        """How many images had a label."""
        return sum(int((labels >= 0).sum()) for labels in self.labels)

    def per_class(self) -> list[ClassResult]:
        """None: without a classifier, no image has five guesses."""
        return []
