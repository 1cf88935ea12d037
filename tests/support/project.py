"""What pyproject.toml says, and the tools that come with its dev extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.support.documents import read

PYPROJECT: dict[str, Any] = tomli.loads(read("pyproject.toml"))
PROJECT: dict[str, Any] = PYPROJECT["project"]


def require_no_complaint(tool: str, *args: str | Path) -> None:
    """Run a tool of the dev extra, which must find nothing. The test skips where it is not installed."""
    path = Path(sys.executable).with_name(tool)
    if not path.exists():
        pytest.skip(f"needs {tool}: pip install -e '.[dev]'")
    done = subprocess.run([path, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
