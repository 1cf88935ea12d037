"""The site of the documentation: it is built strictly, has every page, and asks no other server for anything."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.support.documents import PAGES, ROOT, read
from tests.support.project import PROJECT

pytest.importorskip("mkdocs", reason="needs mkdocs: pip install -e '.[docs]'")
pytest.importorskip("material", reason="needs mkdocs-material: pip install -e '.[docs]'")
pytestmark = pytest.mark.slow

TOP = [page for page in PAGES if "/" not in page]
SOURCE = PROJECT["urls"]["Source"]


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    silent = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=checkout, env=silent, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_page_is_there_and_the_readme_is_the_home_page(site: Path) -> None:
    names = {Path(page).stem.lower() for page in PAGES} - {"readme"} | {"index"}
    assert {path.stem for path in site.glob("*.html")} == names | {"404"}
    headings = re.findall(r"^## (.+)$", read("README.md"), re.MULTILINE)
    home = Elements((site / "index.html").read_text("utf-8")).text
    assert len(headings) > 5
    assert all(heading in home for heading in headings)


def test_it_can_be_searched(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"] if "Token Merging" in entry["text"]}
    assert "usage.html" in found


def test_it_asks_no_other_server_for_anything(site: Path) -> None:
    for path in site.rglob("*.html"):
        for tag, attributes in Elements(path.read_text("utf-8")).found:
            loaded = attributes.get("src") or (attributes.get("href", "") if tag == "link" else "")
            assert not re.match(r"(\w+:)?//", loaded), (path.name, tag, attributes)
            assert attributes.get("data-md-component") != "source", "the theme asks for the stars of a repository"
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", path.read_text("utf-8")), path.name


def test_links_into_the_repository_lead_to_its_files(site: Path) -> None:
    paths = set()
    for page in site.glob("*.html"):
        for _, attributes in Elements(page.read_text("utf-8")).found:
            if attributes.get("href", "").startswith(f"{SOURCE}/"):
                paths.add(attributes["href"].removeprefix(f"{SOURCE}/blob/main/"))
    assert {"LICENSE", "corp_cli/bundled/README.md"} <= paths
    assert all((ROOT / path).exists() for path in paths), paths


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[no page](nowhere.md)", "nowhere.md"),
        ("[no anchor](usage.md#nowhere)", "#nowhere"),
        ("[not at the top](../NOWHERE.md)", "NOWHERE.md"),
        ("[no anchor at the top](../README.md#nowhere)", "#nowhere"),
    ],
)
def test_a_broken_link_fails_the_build(tmp_path: Path, written: str, said: str) -> None:
    checkout = tmp_path / "checkout"
    for folder in ("docs", "corp_cli/bundled"):
        shutil.copytree(ROOT / folder, checkout / folder)
    (checkout / "scripts").mkdir()
    for file in (*TOP, "LICENSE", "mkdocs.yml", "scripts/docs_site.py"):
        shutil.copy(ROOT / file, checkout / file)
    with (checkout / "docs/ci.md").open("a") as page:
        page.write(f"\n{written}\n")
    done = build(checkout, tmp_path / "site")
    assert done.returncode == 1
    assert said in done.stderr


def test_the_address_of_the_repository_is_that_of_the_package() -> None:
    text = read("mkdocs.yml")
    extra = yaml.safe_load(re.search(r"^extra:\n(?: .*\n)+", text, re.MULTILINE)[0])["extra"]  # type: ignore[index]
    assert {extra["source"], extra["social"][0]["link"]} == {SOURCE}
