"""The oldest versions allowed are those that read what comes from strangers safely."""

from __future__ import annotations

import re

from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.documents import ROOT


def test_the_oldest_packages_allowed_are_safe() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    needed = {one.name: one for one in map(Requirement, re.findall(r'^    "(.*?)"', listed[1], re.MULTILINE))}
    for name, unsafe in (
        ("timm", "1.0.25"),  # its loaders default to weights_only=False
        ("torch", "2.5.1"),  # CVE-2025-32434: weights_only=True runs code
        ("pillow", "10.2.0"),  # CVE-2024-28219, and CVE-2023-4863 in the libwebp of 10.0.0
    ):
        assert not needed[name].specifier.contains(unsafe), f"{name} {unsafe}"
        assert all(one.operator != "==" for one in needed[name].specifier)
        bound = next(Version(one.version) for one in needed[name].specifier if one.operator == ">=")
        assert bound > Version(unsafe)
