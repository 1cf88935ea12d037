"""What is measured of a model without a classifier: how alike its features are to a reference's, and k-NN accuracy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from corp_cli.linalg.similarity import knn_hits, linear_cka
from corp_cli.measure.metrics import ClassResult
from corp_cli.measure.results import Evaluation


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
