"""What a result depends on besides the config: versions, device, threads; and what it cost in memory."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from corp_cli.version import __version__

CHECKOUT = Path(__file__).parents[2]  # where corp runs from its sources


def versions() -> dict[str, str]:
    """Package → version."""
    packages = ("torch", "timm", "safetensors", "numpy", "scipy", "pillow", "hydra-core")
    return {"corp": __version__, "python": platform.python_version(), **{p: version(p) for p in packages}}


def git_commit(checkout: Path = CHECKOUT) -> str | None:
    """The commit that `checkout` is at, read from its files so that no git is needed; None outside a checkout."""
    git = checkout / ".git"
    try:
        if git.is_file():  # a worktree: "gitdir: FOLDER"
            git = checkout / git.read_text("utf-8").partition(":")[2].strip()
        head = (git / "HEAD").read_text("utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        shared = git / common.read_text("utf-8").strip() if common.is_file() else git
        if (shared / name).is_file():
            return (shared / name).read_text("utf-8").strip()
        packed = (shared / "packed-refs").read_text("utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit, platform, device and threads, as JSON types."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": versions(),
        "git_commit": git_commit(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": name,
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
    }


def peak_memory_mib(device: torch.device) -> dict[str, float | None]:
    """Peak resident memory of this process and, on CUDA only, peak allocated device memory, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss: bytes on macOS, KiB elsewhere
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return {"host": host, "device": torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None}
