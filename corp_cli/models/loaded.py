"""A model together with what is known of it: dense, pruned, to judge, to time or to export."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from threading import Thread

import torch
from torch import Tensor, nn

from corp_cli.config.images import DataConfig
from corp_cli.config.prune import ModelConfig
from corp_cli.measure.results import Count
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Block
from corp_cli.models.counts import count
from corp_cli.models.loading import load_dense, state_tensors
from corp_cli.models.spec import Manifest, ModelSpec

Buffer = bytes | memoryview


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, where it came from, and what builds its dense architecture again."""

    source: str  # the checkpoint's file, or the name of a dense model
    model: nn.Module
    spec: ModelSpec
    manifest: Manifest | None = None  # of a pruned model

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Its blocks, first to last. Raises CorpError where there are none that corp can read."""
        return blocks_of(self.model)

    @cached_property
    def sha256(self) -> str:
        """`weights_sha256` of the model as it was when this, or `hash_ahead`, was first asked."""
        return self._sha256.result()

    def hash_ahead(self) -> None:
        """Begin with `sha256`, which takes seconds of large models, while other work goes on; holds their weights."""
        _ = self._sha256

    @cached_property
    def _sha256(self) -> Future[str]:
        parts, found = hashed_parts(state_tensors(self.model)), Future[str]()

        def work() -> None:  # nothing of torch: Python may end meanwhile, and its threads then end badly
            try:
                found.set_result(sha256_of(parts))
            except BaseException as error:
                found.set_exception(error)
            parts.clear()

        Thread(target=work, daemon=True).start()  # hashlib works without Python's lock
        return found

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.model.parameters()).device

    def count(self) -> Count:
        """Parameters and MACs."""
        return count(self.spec, self.manifest.blocks if self.manifest else {})


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the state dict, in order of name."""
    return sha256_of(hashed_parts(state_tensors(model)))


def hashed_parts(state: dict[str, Tensor]) -> list[Buffer]:
    """What is hashed of contiguous CPU tensors, one after the other; their bytes are not copied."""
    parts: list[Buffer] = []
    for name, tensor in sorted(state.items()):
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        parts.append(tensor.detach().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return parts


def sha256_of(parts: list[Buffer]) -> str:
    """That of all of `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def dense_model(cfg: ModelConfig, data: DataConfig | None = None, seed: int = 0) -> LoadedModel:
    """The model that `cfg` names, with what `load_dense` says of `data` and `seed`. Raises CorpError as that does."""
    model, spec = load_dense(cfg, data, seed)
    return LoadedModel(cfg.checkpoint or cfg.name, model, spec)
