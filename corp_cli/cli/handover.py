"""What jobs that a launcher runs in other processes, or on other machines, tell the one that began them.

Every such job keeps a small JSON file in a folder that all of them see: that it has begun, then what came of it.
"""

from __future__ import annotations

import json
import os
import platform
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from corp_cli.cli.compose import register
from corp_cli.cli.job import Job, Task, Value, carry_out
from corp_cli.errors import CorpError, GateError
from corp_cli.files.locks import is_busy
from corp_cli.files.output import write_whole

KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (CorpError, GateError)}


@dataclass(frozen=True)
class Record:
    """A job as it is written; `ended` is false while it runs, and stays so where its process is killed."""

    number: int
    overrides: str
    output_dir: str
    where: str
    dry: bool
    ended: bool
    error: tuple[str, str] | None  # its type and its message


def this_process() -> str:
    """A name of this process that no other has, on whatever machine."""
    return f"{platform.node()} {os.getpid()}"


@dataclass
class Runner:
    """What Hydra calls for every job, wherever its launcher does: the `jobs` of this process are collected."""

    task: Task
    jobs: list[Job] = field(default_factory=list)
    process: str = field(default_factory=this_process)

    def __call__(self, cfg: DictConfig) -> Value:
        """Carry out one job → what the sweeper goes by; an error is kept for later, since the others go on."""
        elsewhere, folder = this_process() != self.process, self.task.shared
        if elsewhere and folder is None:
            raise CorpError(
                "Jobs in other processes need a folder .shared of corp's own within that of the sweep, and one of that "
                "name is there already; choose another with hydra.sweep.dir=FOLDER."
            )
        job = carry_out(self.task, cfg, (lambda job: leave(job, folder, False)) if elsewhere and folder else None)
        self.jobs.append(job)
        if isinstance(job.error, KeyboardInterrupt):
            raise type(job.error)(*filter(None, [job.hint])) from None
        if elsewhere and folder is not None:
            if job.error is not None and os.environ.get("CORP_DEBUG") == "1":
                traceback.print_exception(job.error)
            leave(job, folder, True)
        return job.value

    def __reduce__(self) -> tuple[Any, ...]:
        """Launchers pickle it for processes that have not begun as `corp` does."""
        return arrived, (self.task, self.process)


def arrived(task: Task, process: str) -> Runner:
    """The Runner of `task`, in another process than it was made in."""
    register()
    return Runner(task, [], process)


def leave(job: Job, folder: Path, ended: bool) -> None:
    """Write what is known of `job` into `folder`. Raises CorpError if that fails."""
    error = None if job.error is None else (type(job.error).__name__, str(job.error))
    record = Record(job.number, job.overrides, str(job.output_dir), job.where, job.dry, ended, error)
    # The name of a folder may be no UTF-8; JSON escapes it.
    write_whole(folder / f"job-{job.number}.json", lambda file: file.write(json.dumps(asdict(record))))


def collect(folder: Path) -> tuple[list[Job], list[Job]]:
    """The jobs that ended elsewhere, those that will never end among them as failed; and those that go on."""
    done: list[Job] = []
    going_on: list[Job] = []
    for path in sorted(folder.glob("job-*.json")):
        record = Record(**json.loads(path.read_text("utf-8")))
        error: Exception | None = None
        if record.error is not None:
            kind, message = record.error
            # A bug is told by the name of its type, which this process may not know.
            error = KINDS.get(kind, type(kind, (Exception,), {}))(message)
        elif not record.ended:
            error = CorpError("its process ended before the job was done; it may have been killed for want of memory.")
        output_dir = Path(record.output_dir)
        job = Job(record.number, record.overrides, output_dir, record.where, record.dry, error)
        (going_on if not record.ended and is_busy(output_dir) else done).append(job)
    return done, going_on
