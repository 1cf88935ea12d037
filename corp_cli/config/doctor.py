"""The schema of `corp doctor`. Imports neither torch nor timm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DoctorConfig:
    """`corp doctor` can be told nothing."""
