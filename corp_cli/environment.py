"""What a result depends on besides the config: versions, device, threads; and what it cost in memory."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import version
from typing import Any

import torch

from corp_cli.version import __version__


def versions() -> dict[str, str]:
    """Package → version."""
    packages = ("torch", "timm", "safetensors", "numpy", "scipy", "hydra-core")
    return {"corp": __version__, "python": platform.python_version(), **{p: version(p) for p in packages}}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, platform and device, as JSON types."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": name,
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def peak_memory_mib(device: torch.device) -> dict[str, float]:
    """Peak resident memory of this process and, on CUDA, peak allocated device memory, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss: bytes on macOS, KiB elsewhere
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device.type == "cuda":
        peaks["device"] = torch.cuda.max_memory_allocated(device) / 2**20
    return peaks
