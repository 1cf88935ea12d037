"""corp in forked children of a process that has imported everything: a run takes a second, and none reaches another."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from hydra._internal.hydra import Hydra
from hydra.types import RunMode

from corp_cli.cli.main import main
from corp_cli.commands import prune as _imported  # noqa: F401  with all that a run needs, once
from corp_cli.models.bundled import BUNDLED, BundledModel
from tests.support.tiny import NARROW, write_tiny
from tests.support.typed import UNTIMED

HUNG = -signal.SIGALRM
KILLED = 137
KEEP = tempfile.TemporaryDirectory(prefix="corp-faults-")  # what all cases share, gone with this process
atexit.register(KEEP.cleanup)
SECONDS = 180  # after which a child is taken to hang
MEMORY = 2**31  # bytes that a child may take besides what it was forked with, where it is limited


@dataclass(frozen=True)
class Outcome:
    """What came of a child: its exit code, or minus the signal that ended it, and what it said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Child:
    """A child that is at work."""

    pid: int
    out: IO[bytes]
    err: IO[bytes]

    def wait(self) -> Outcome:
        """What came of it, when it has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = []
        for file in (self.out, self.err):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
            file.close()
        return Outcome(code, *said)


def fork(work: Callable[[], Any], folder: Path, seconds: int = SECONDS, limited: bool = False) -> Child:
    """Begin `work` in a child whose current folder is `folder`; it ends after so many `seconds` at the latest."""
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of this process do not run torch
        pid = os.fork()
    if pid:
        return Child(pid, out, err)
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(seconds)
        for number, file in ((1, out), (2, err)):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
        warnings.resetwarnings()  # as a user has them, whatever pytest makes of them
        torch.set_num_threads(1)  # a forked process must not use the threads of its parent
        os.environ.pop("CORP_DEBUG", None)
        os.chdir(folder)
        if limited:
            limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        code = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def corp(folder: Path, *argv: str, before: Callable[[], object] = lambda: None, seconds: int = SECONDS) -> Outcome:
    """`corp <argv>` in `folder`, on the digits in a narrow model; `before` is done in the same process first."""
    return begin(folder, *argv, before=before, seconds=seconds).wait()


def begin(folder: Path, *argv: str, before: Callable[[], object] = lambda: None, seconds: int = SECONDS) -> Child:
    """The same, without waiting for it."""
    tiny = narrow()

    def work() -> int:
        BUNDLED["vit_digits"] = tiny
        Hydra.get_mode = lambda *_, **__: RunMode.RUN  # type: ignore[method-assign]  # saves composing the config once more
        before()
        return main(argv)

    return fork(work, folder, seconds)


@cache
def narrow() -> BundledModel:
    """The model that stands for the bundled one; made in a child, so that this process runs no torch."""
    path = shared("tiny") / "tiny.safetensors"
    made = fork(lambda: write_tiny(path) is None, path.parent).wait()
    assert made.code == 0, made.err
    return replace(BUNDLED["vit_digits"], args=NARROW, weights=path)


def warm_up() -> None:
    """Run corp once in this process, so that its children find imported what is imported on first use."""
    torch.set_num_threads(1)
    before, BUNDLED["vit_digits"] = BUNDLED["vit_digits"], narrow()
    with scratch() as folder, open(os.devnull, "w") as nowhere:
        settings = ["sparsity.macs=0.4", "sparsity.curve_images=16", "export.formats=[timm,torchscript]"]
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            main(prune(*settings, into=str(folder / "run")))
    BUNDLED["vit_digits"] = before
    gc.collect()
    gc.freeze()  # or every child would copy all of it


def shared(name: str) -> Path:
    """An empty folder that lasts as long as this process."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=KEEP.name))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder for one case."""
    with tempfile.TemporaryDirectory(dir=KEEP.name, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def prune(*settings: str, into: str = "run") -> list[str]:
    """The arguments of a quick run."""
    return ["prune", *UNTIMED, f"hydra.run.dir={into}", *settings]


# --- what is asked of every answer -----------------------------------------------------------------------------

NOISE = ("Traceback", "unexpected error", "Logging error", "Error executing job", "Exception ignored")


def require_sentence(outcome: Outcome, *codes: int) -> None:
    """It ended with one of `codes` and, where that is a mistake, in a sentence of corp's: no traceback."""
    lines = [line.strip() for line in outcome.err.splitlines() if line.strip()] or [""]
    worst = next((line for line in lines if "unexpected error" in line), lines[-1])[:300]
    assert outcome.code != HUNG, "hangs"
    assert outcome.code in codes, f"exit {outcome.code}: {worst}"
    if outcome.code not in (0, KILLED):
        found = [word for word in NOISE if word in outcome.err]
        assert not found, f"{found[0]}: {worst}"
        assert lines[-1].startswith("corp: "), f"no sentence: {lines[-1][:200]!r}"
        assert max(map(len, lines)) < 2000, "a sentence of more than 2000 characters"
