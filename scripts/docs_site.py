"""Hooks of mkdocs: the pages at the top of the repository become pages of the site, and every link leads on.

Links are written as GitHub reads them. On the site, one to a page leads to that page, and one to any other file to the
repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TOP = {  # file at the top of the repository → page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")  # the path of a link that is neither an address nor in the page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """`files`, which are those of docs/, and the pages at the top."""
    for source, page in TOP.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with its links as the site needs them."""
    sources = {page: source for source, page in TOP.items()}
    path = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if not (ROOT / target).exists():
            return match[1]  # mkdocs says where
        on_site = TOP.get(target, target.removeprefix("docs/"))
        return on_site if files.get_file_from_path(on_site) else f"{config.extra['source']}/blob/main/{target}"

    return LINK.sub(lead, markdown)
