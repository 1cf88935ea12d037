"""A model that is hashed while other work goes on."""

from __future__ import annotations

import torch
from torch import nn

from corp_cli.models.loaded import LoadedModel, weights_sha256
from corp_cli.models.spec import ModelSpec


def test_the_hash_is_of_the_weights_as_they_were_when_it_began() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    torch.manual_seed(0)
    first = model()
    loaded = LoadedModel("it", first, ModelSpec("none", {}, {}))
    expected = weights_sha256(first)
    loaded.hash_ahead()
    first.to(torch.float64)  # as a move to another device: new tensors, and the old ones stay what they are
    assert weights_sha256(first) != expected
    assert loaded.sha256 == expected == loaded.sha256
