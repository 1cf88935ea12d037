"""What a result depends on besides the config: versions, device, threads; and what it cost in memory."""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from corp_cli.version import __version__

if TYPE_CHECKING:
    import torch

CHECKOUT = Path(__file__).parents[2]  # where corp runs from its sources


def versions() -> dict[str, str]:
    """Package → version."""
    packages = ("torch", "timm", "safetensors", "numpy", "scipy", "pillow", "hydra-core")
    return {"corp": __version__, "python": platform.python_version(), **{p: version(p) for p in packages}}


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


@dataclass(frozen=True)
class Environment:
    """What the figures of a report depend on besides models, images and settings."""

    versions: dict[str, str]
    git_commit: str | None
    platform: str
    device: str
    device_name: str
    cpu_count: int | None
    cpu_capability: str
    torch_threads: int
    torch_interop_threads: int


def environment(device: torch.device) -> Environment:
    """That of this process, which computes on `device`."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return Environment(
        versions(),
        git_commit(),
        platform.platform(),
        str(device),
        name,
        os.cpu_count(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
    )


@functools.cache
def cpu_name() -> str:
    """What its maker calls this processor, such as "AMD EPYC 7B13"; its architecture where that cannot be found out."""
    if named := linux("cpuinfo").get("model name"):
        return named
    import cpuinfo  # takes a second: it measures the clock as well

    try:
        named = cpuinfo.get_cpu_info().get("brand_raw")
    except Exception:  # of an architecture that it does not know
        named = None
    return named or platform.processor() or platform.machine()


def linux(file: str) -> dict[str, str]:
    """key → value of /proc/`file`, the last of each; empty on other systems."""
    with suppress(OSError):
        lines = Path("/proc", file).read_text("utf-8").splitlines()
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


@dataclass(frozen=True)
class Memory:
    """Peak resident memory of this process and, on CUDA only, peak allocated device memory, in MiB."""

    host: float
    device: float | None


def peak_memory_mib(device: torch.device) -> Memory:
    """What this process took at most so far."""
    import torch

    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss: bytes on macOS, KiB elsewhere
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return Memory(host, torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None)
