"""Folders of corp's own inside those of a user: made with a marker in them, and cleared by name, so that what somebody
else put there, or a folder of the same name, is never used or removed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from corp_cli.files.output import appearing, remove_partial

MARKER = "made-by-corp.txt"
KINDS = ("statistics", "curves", "block", "job")
OWN = (*(f"{kind}-*" for kind in KINDS), *(f".{kind}-*.{end}" for kind in KINDS for end in ("lock", "partial")), MARKER)


def claim(folder: Path) -> Path | None:
    """`folder`, made now or by an earlier run of corp, never without its marker; None where it is somebody else's."""
    if not os.path.lexists(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with appearing(folder) as fresh:
                fresh.mkdir()
                (fresh / MARKER).write_text("corp removes this folder when it is done with it.\n")
        except OSError:
            if not os.path.lexists(folder):  # by another run in the meantime
                raise
    return folder if is_own(folder) else None


def is_own(folder: Path) -> bool:
    """Whether corp made `folder`."""
    return (folder / MARKER).is_file() and not folder.is_symlink()


def clear(folder: Path) -> None:
    """Remove what corp keeps in `folder`, if that is its own, and the folder where nothing else is in it."""
    if not is_own(folder):
        return
    with contextlib.suppress(OSError):
        remove_partial(folder)
        for pattern in OWN:  # the marker last
            for path in folder.glob(pattern):
                path.unlink()
        folder.rmdir()
