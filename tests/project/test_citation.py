"""CITATION.cff: it has what the Citation File Format 1.2 requires, and says what pyproject.toml and the README say."""

from __future__ import annotations

from typing import Any

import yaml

import corp_cli
from tests.support.documents import read
from tests.support.project import PROJECT

CITATION: dict[str, Any] = yaml.safe_load(read("CITATION.cff"))
(PAPER,) = CITATION["references"]


def test_it_has_what_the_format_requires() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()
    assert CITATION["type"] in ("software", "dataset")
    assert {"title", "type", "authors"} <= PAPER.keys()
    for work in (CITATION, PAPER):
        assert work["authors"]
        for author in work["authors"]:  # a person, or an entity
            assert {"family-names", "given-names"} <= author.keys() or author.keys() == {"name"}
    assert all(
        isinstance(value, str) for key, value in CITATION.items() if key not in ("authors", "keywords", "references")
    )


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
