"""Bad inputs to corp, each of which must end in one plain sentence, exit code 2, and nothing left behind.

Where a long run had begun, what it has done stays, and a second line says how to go on.

    python -m tests.support.bad_inputs                 # all of them, about a minute
    python -m tests.support.bad_inputs --match check   # those whose name holds "check"

Prints one table and exits with 1 if any of them ends otherwise. Needs neither network nor downloads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")  # before the hub's client and torch are imported

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from corp_cli.cli.main import main as corp
from tests.support.bad_input_cases import CASES, GROUPS, Case

NOTE = re.compile(r"corp: (warning: |images are seen at |statistics of |go on with: )")  # said besides the sentence


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    code: int
    stderr: str
    left: list[str]  # files and folders that were not there before

    def sentence(self) -> str:
        """The line that says what is wrong."""
        said = [line for line in self.stderr.splitlines() if not NOTE.match(line)]
        return said[0] if len(said) == 1 else self.stderr.strip()

    def problems(self, words: tuple[str, ...]) -> list[str]:
        """What is not as it should be; empty where the answer is good."""
        said = [line for line in self.stderr.splitlines() if not NOTE.match(line)]
        checks = {
            f"exit code {self.code}": self.code == 2,
            f"{len(said)} lines": len(said) == 1,
            "not from corp": all(line.startswith("corp: ") for line in said),
            "traceback": "Traceback" not in self.stderr,
            f"left {', '.join(self.left)}": bool(self.left) == ("corp: go on with: " in self.stderr),
            **{f"lacks '{word}'": word in self.sentence() for word in words},
        }
        return [problem for problem, good in checks.items() if not good]


# --- running them ---------------------------------------------------------------------------------------------


def answer(case: Case) -> Outcome:
    """Type the case in a new folder."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            case.prepare()
            before = everything()
            code, stderr = run_limited(case) if case.file_limit_kib is not None else run(case.argv)
            return Outcome(code, stderr, sorted(everything() - before))
        finally:
            os.chdir(home)


def run(argv: list[str]) -> tuple[int, str]:
    """(exit code, stderr) of corp, in this process."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        code = corp(argv)
    return code, stderr.getvalue()


def run_limited(case: Case) -> tuple[int, str]:
    """(exit code, stderr) of corp in a process that cannot write larger files."""
    script = f'ulimit -f {case.file_limit_kib}; exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "corp_cli", *case.argv]
    # Output goes through pipes, which the limit does not concern.
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def everything() -> set[str]:
    """All files and folders below the current one."""
    return {str(path) for path in Path().rglob("*")}


def main() -> int:
    """Print the table → 0 where every answer is good, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--match", default="", help="only inputs whose name holds this")
    parser.add_argument("--group", choices=sorted(GROUPS), help="only inputs of this kind")
    args = parser.parse_args()
    os.environ.pop("CORP_DEBUG", None)
    table = Table("input", "code", "what corp says", Column("", max_width=40))
    failed = 0
    cases = [case for case in (GROUPS[args.group] if args.group else CASES) if args.match in case.name]
    for case in cases:
        outcome = answer(case)
        problems = outcome.problems(case.words)
        failed += bool(problems)
        verdict = f"not ok: {'; '.join(problems)}" if problems else "ok"
        table.add_row(*(Text(cell) for cell in (case.name, str(outcome.code), outcome.sentence(), verdict)))
    console = Console(width=200)
    console.print(table)
    console.print(f"{len(cases) - failed} of {len(cases)} bad inputs are answered well.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
