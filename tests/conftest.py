"""What tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

REAL_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """DeiT-Tiny, calib and nips1000; the test skips where they are not at hand (they are not ours to hand out)."""
    if not (REAL_DATA / "deit_tiny_patch16_224.safetensors").is_file():
        pytest.skip(f"real data (DeiT-Tiny and ImageNet images) not found at {REAL_DATA}")
    return REAL_DATA
