"""Parameters and MACs, counted from shapes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from corp_cli.measure.macs import count_macs
from corp_cli.measure.results import Count
from corp_cli.models.loading import parameters, skeleton
from corp_cli.models.resize import resize
from corp_cli.models.spec import ModelSpec, PrunedSizes


def sized_skeleton(spec: ModelSpec, blocks: Mapping[str, PrunedSizes]) -> nn.Module:
    """The architecture with blocks of these sizes (dense where there is no entry), on the meta device."""
    model = skeleton(spec)
    resize(model, dict(blocks))
    return model


def count(spec: ModelSpec, blocks: Mapping[str, PrunedSizes]) -> Count:
    """Parameters, MACs and FLOPs = 2 MACs of one image, with blocks of these sizes (dense where there is no entry)."""
    return counted(sized_skeleton(spec, blocks), spec)


def counted(model: nn.Module, spec: ModelSpec) -> Count:
    """The same of a skeleton as it is."""
    macs = count_macs(model, spec.data["input_size"])
    return Count(parameters(model), macs, 2 * macs)
