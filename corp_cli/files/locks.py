"""Locks between processes, and between containers that share a disk. The system lets go of them where one dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from corp_cli.errors import CorpError
from corp_cli.files.output import cannot_write, remove_partial
from corp_cli.runtime import console

LOCK = ".corp.lock"  # in a folder while a command writes to it
PATIENCE = 1.0  # seconds of waiting before it is said
NO_LOCKS = (OSError, NotImplementedError)  # of disks that know none: as well as can be without


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Let nobody else write to `folder` during the body, and remove what killed runs had begun to write there.

    Raises CorpError where another command is at it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpError(cannot_write(folder, error)) from error
    lock = FileLock(folder / LOCK)
    with contextlib.suppress(*NO_LOCKS):
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise CorpError(
                f"Another corp is writing to {folder}; wait for it, or choose another with hydra.run.dir=FOLDER."
            ) from error
    try:
        for place in (folder, folder / ".hydra"):
            remove_partial(place)
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()


def is_busy(folder: Path) -> bool:
    """Whether another command is writing to `folder`."""
    if not (folder / LOCK).is_file():
        return False
    lock = FileLock(folder / LOCK)
    with contextlib.suppress(*NO_LOCKS):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
    lock.release()
    return False


@contextlib.contextmanager
def in_turn(path: Path, doing: str) -> Iterator[None]:
    """Let nobody else make the file `path` during the body, and remove what killed runs had begun to write of it.

    Others who are at it go first; what they are `doing` is said meanwhile.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    with contextlib.suppress(*NO_LOCKS):
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            console.err().print(f"corp: waiting for another run that is {doing}", style="dim", markup=False)
            lock.acquire()
    try:
        if lock.is_locked:
            remove_partial(path.parent, path.name)
        yield
    finally:
        lock.release()
