"""How many bytes of tensors are alive together at most, whatever an allocator makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    """Counts the storages that operations make while it is in force."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.alive:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        now = sum(size for _, size in self.alive.values())
        if now > self.peak:
            self.peak = now
            self.reached()
        return out

    def reached(self) -> None:
        """There is a new peak."""
