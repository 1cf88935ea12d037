"""The log file of a command that writes an output folder; configs/hydra/job_logging/file.yaml sets it up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from corp_cli.errors import CorpError, GateError, Terminated
from corp_cli.version import __version__

PACKAGE = "corp_cli"  # the logger above those of all modules
_log = logging.getLogger(__name__)


class LogFile(logging.FileHandler):
    """A file handler that keeps quiet where the disk is full: a log must not end a run."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, if that is possible."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def close(self) -> None:
        """Close the file, whatever of it could be written."""
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say nothing."""


@contextlib.contextmanager
def recorded(command: str, overrides: str, output_dir: Path) -> Iterator[None]:
    """Log the body as the run of `corp <command> <overrides>`: that it begins, where its results are, or its error."""
    _log.info("corp %s: %s", __version__, f"corp {command} {overrides}".rstrip())
    try:
        yield
        _log.info("results are in %s", output_dir)
    except (CorpError, GateError) as error:
        _log.error("%s", " ".join(str(error).split()))
        raise
    except KeyboardInterrupt as stop:
        _log.error("terminated" if isinstance(stop, Terminated) else "interrupted")
        raise
    except Exception:
        _log.exception("unexpected error")
        raise
    finally:  # leave logging as it was: what runs next has a log of its own or none
        package = logging.getLogger(PACKAGE)
        for handler in [handler for handler in package.handlers if isinstance(handler, LogFile)]:
            package.removeHandler(handler)
            handler.close()
            package.setLevel(logging.NOTSET)
            package.addHandler(logging.NullHandler())
