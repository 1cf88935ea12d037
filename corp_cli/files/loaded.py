"""A model to judge, to time or to export: dense or pruned, with all that is known of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from corp_cli.config.prune import DataConfig, ModelConfig
from corp_cli.files.checkpoint import Manifest, load_pruned, read_manifest
from corp_cli.measure.results import Count
from corp_cli.models.counts import count
from corp_cli.models.loading import ModelSpec, load_dense
from corp_cli.models.preprocess import with_overrides


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on the CPU, where it came from, and what builds its dense architecture again."""

    source: str  # the checkpoint's file, or the name of a dense model
    model: nn.Module
    spec: ModelSpec
    manifest: Manifest | None = None  # of a pruned model

    def count(self) -> Count:
        """Parameters and MACs."""
        return count(self.spec, self.manifest.blocks if self.manifest else {})


def dense_model(cfg: ModelConfig, data: DataConfig | None = None) -> LoadedModel:
    """The model that `cfg` names; `data` overrides its preprocessing. Raises CorpError as `load_dense` does."""
    model, spec = load_dense(cfg, data)
    return LoadedModel(cfg.checkpoint or cfg.name, model, spec)


def pruned_model(path: str, data: DataConfig | None = None) -> LoadedModel:
    """The model in a pruned checkpoint; `data` overrides its preprocessing. Raises CorpError as `load_pruned` does."""
    manifest, model = read_manifest(path), load_pruned(path)
    if data:
        spec = replace(manifest.model, data=with_overrides(manifest.model.data, data, model))
        manifest = replace(manifest, model=spec)
    return LoadedModel(path, model, manifest.model, manifest)
