"""A model together with what is known of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from corp_cli.models.blocks import Block
from corp_cli.models.loading import ModelSpec


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, its blocks first to last, and all that builds its dense architecture again."""

    model: nn.Module
    spec: ModelSpec
    blocks: tuple[Block, ...]

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.model.parameters()).device
