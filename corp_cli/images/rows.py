"""Text files that a user wrote, whole or by rows; a CorpError, naming the config key, for one that is none."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from corp_cli.errors import CorpError


def require_regular(path: Path, where: str) -> None:
    """Raise CorpError for a pipe, device, socket or folder: reading one may never end."""
    if path.exists() and not path.is_file():
        raise CorpError(f"{where} is not a regular file; give one.")


def read_text(path: Path, where: str) -> str:
    """The text of a file; a CorpError where it is missing, unreadable or not text."""
    require_regular(path, where)
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpError(f"{where} is not a text file ({error.reason}); save it as UTF-8.") from error
    except OSError as error:
        raise CorpError(f"{where} cannot be read ({error.strerror}); check the path and its permissions.") from error


def read_rows(path: Path, where: str) -> list[list[str]]:
    """The rows of a text file: split at commas or tabs in .csv and .tsv, one cell a line elsewhere; blanks left out."""
    text, suffix = read_text(path, where), path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        try:
            rows = list(csv.reader(io.StringIO(text), delimiter="\t" if suffix == ".tsv" else ","))
        except csv.Error as error:
            raise CorpError(f"{where} is not a table of cells ({error}); correct it.") from error
    else:
        rows = [[line] for line in text.splitlines()]
    stripped = [[cell.strip() for cell in row] for row in rows]
    return [row for row in stripped if any(row) and not row[0].startswith("#")]
