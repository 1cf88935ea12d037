"""CITATION.cff: it is valid, and says what pyproject.toml and the README say."""

from __future__ import annotations

from typing import Any

import yaml

import corp_cli
from tests.support.documents import ROOT, read
from tests.support.project import PROJECT, require_no_complaint

CITATION: dict[str, Any] = yaml.safe_load(read("CITATION.cff"))
(PAPER,) = CITATION["references"]


def test_the_schema_of_the_format_allows_it() -> None:
    """That of Citation File Format 1.2.0, as published."""
    require_no_complaint("check-jsonschema", "--builtin-schema", "vendor.citation-file-format", ROOT / "CITATION.cff")


def test_it_says_what_the_project_says() -> None:
    assert CITATION["version"] == corp_cli.__version__
    assert CITATION["repository-code"] == PROJECT["urls"]["Source"]
    assert CITATION["keywords"] == PROJECT["keywords"]
    assert CITATION["license"] in PROJECT["license"]
    assert CITATION["authors"] == PROJECT["authors"]


def test_it_cites_the_paper_of_the_readme() -> None:
    readme = " ".join(read("README.md").split())
    name, title = PAPER["title"].split(": ", 1)
    assert f'It implements {name}, "{title}"' in readme
    names = " and ".join(f"{author['given-names']} {author['family-names']}" for author in PAPER["authors"])
    assert f"({names}, Purdue University)" in readme
