"""What pyproject.toml says."""

from __future__ import annotations

from typing import Any

import tomli

from tests.support.documents import read

PYPROJECT: dict[str, Any] = tomli.loads(read("pyproject.toml"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
