"""Shell completion for bash, zsh and fish: `corp -sc install|uninstall|query=SHELL`."""

from __future__ import annotations

import contextlib
import io
import os
import re
from glob import escape, glob
from pathlib import Path
from typing import Sequence

from corp_cli.cli.table import COMMANDS
from corp_cli.config.export import FORMATS, INT8, WEIGHTS
from corp_cli.config.images import CROP_MODES, DTYPES, INTERPOLATIONS, OFFLOADS
from corp_cli.config.outcome import OBJECTIVES, TRACKERS
from corp_cli.config.prune import COMPENSATIONS, RANKERS
from corp_cli.errors import CorpError

# Each function asks `corp -sc query` for candidates, one a line; no space follows those that end in '=', '.', '/'.
# readline replaces only what follows the last of COMP_WORDBREAKS, so in bash candidates lose what stands before.
INSTALL = {
    "bash": r"""_corp_complete() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" word before= i
    word="${line##*[[:space:]]}"
    if [[ $COMP_WORDBREAKS == *=* ]]; then before="${word%"${word##*[=:]}"}"; fi
    COMPREPLY=($(COMP_LINE="$line" "$1" -sc query=bash 2> /dev/null))
    for i in "${!COMPREPLY[@]}"; do
        [[ ${COMPREPLY[i]} == *[=./] ]] || COMPREPLY[i]+=" "
        COMPREPLY[i]="${COMPREPLY[i]#"$before"}"
    done
}
complete -o nospace -F _corp_complete corp""",
    "zsh": r"""_corp_complete() {
    local -a found
    found=(${(f)"$(COMP_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" ${~words[1]} -sc query=zsh 2> /dev/null)"})
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
compdef _corp_complete corp""",
    "fish": r"""function _corp_complete
    set -l words (commandline -opc)
    COMP_LINE=(commandline -cp) $words[1] -sc query=fish 2> /dev/null
end
complete -c corp -f -a '(_corp_complete)'""",
}
UNINSTALL = {
    "bash": "complete -r corp; unset -f _corp_complete",
    "zsh": "compdef -d corp; unfunction _corp_complete",
    "fish": "complete -e -c corp; functions -e _corp_complete",
}
FLAGS = ("--help", "--multirun", "--cfg", "--info", "--config-dir", "--config-name", "--hydra-help")
OWN_FLAGS = {"check": ("--against",), "prune": ("--dry-run",), "push": ("--dry-run",), "study": ("--dry-run",)}
PATH_KEYS = (
    *(f"calibration.{key}" for key in ("path", "root", "cache", "scratch")),
    *(f"evaluation.{key}" for key in ("path", "root", "labels", "class_map")),
    *(
        "model.checkpoint",
        "sparsity.plan",
        "checkpoint",
        "folder",
        "report",
        "runs",
        "output",
        "against",
        "junit",
        "markdown",
    ),
)
VALUES = {
    **{f"ranker.{group}": choices for group, choices in RANKERS.items()},
    **{f"compensation.{group}": choices for group, choices in COMPENSATIONS.items()},
    "calibration.offload": OFFLOADS,
    "data.interpolation": INTERPOLATIONS,
    "data.crop_mode": CROP_MODES,
    "private": ("true", "false"),
    "keep_weights": ("true", "false"),
    "objective": tuple(OBJECTIVES),
    "track": ("none", *TRACKERS),
    "device": ("auto", "cpu", "cuda", "mps"),
    "dtypes": [f"[{dtype}]" for dtype in DTYPES],
    "evaluation.precision": DTYPES,
    "format": FORMATS,
    "dtype": WEIGHTS,
    "int8": INT8,
    "export.dtype": WEIGHTS,
    "export.int8": INT8,
    "export.formats": [f"[{name}]" for name in FORMATS],
}


def shell_completion(request: str, commands: Sequence[str]) -> str:
    """What `corp -sc <request>` prints: a script for the shell to run, or the candidates, one a line."""
    action, _, shell = request.partition("=")
    if action not in ("install", "uninstall", "query") or shell not in INSTALL:
        raise CorpError(f"-sc needs install=SHELL or uninstall=SHELL, SHELL one of {', '.join(INSTALL)}.")
    if action == "query":
        # Half-typed words are the rule here: what cannot be completed is no error.
        with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stderr(io.StringIO()):
            return "\n".join(candidates(os.environ.get("COMP_LINE", ""), commands))
        return ""
    return INSTALL[shell] if action == "install" else UNINSTALL[shell]


def candidates(line: str, commands: Sequence[str]) -> list[str]:
    """What the last word of the command line `line` (up to the cursor) can become."""
    _, _, typed = line.lstrip().partition(" ")
    command, space, rest = typed.lstrip().partition(" ")
    if not space:
        return [name for name in commands if name.startswith(command)]
    if command not in commands:
        return []
    words = rest.split()
    word = "" if not rest or rest[-1].isspace() else words.pop()
    if words and words[-1] in ("--config-dir", "-cd", "--against"):
        return _paths(word)
    if word.startswith("-"):
        return [flag for flag in (*OWN_FLAGS.get(command, ()), *FLAGS) if flag.startswith(word)]
    key, equals, value = word.partition("=")
    if equals and key in PATH_KEYS:
        return [f"{key}={path}" for path in _paths(value)]
    if equals and key in VALUES:
        return [f"{key}={choice}" for choice in VALUES[key] if choice.startswith(value)]
    from corp_cli.cli.hydra_app import BARE, spelled_out

    words = [one for one in words if one != "--dry-run"]
    if command in BARE:
        found = _hydra_candidates(command, spelled_out(command, words), word)
        return found if command == "push" else [*found, *_paths(word)]  # which names no file
    return _hydra_candidates(command, words, word)


def _paths(start: str) -> list[str]:
    """Files and folders/ whose path begins with `start`, without those that need quoting."""
    found = sorted(path for path in glob(f"{escape(start)}*") if not set(path) & set(" \t\n=,'\""))
    return [f"{path}/" if Path(path).is_dir() else path for path in found]


def _hydra_candidates(command: str, words: list[str], word: str) -> list[str]:
    from dataclasses import fields

    from corp_cli.cli import hydra_private
    from corp_cli.cli.hydra_app import BARE, config_loader, fits, parse_flags, spelled_out

    flags = parse_flags(command, spelled_out(command, words) if command in BARE else words)
    loader = config_loader(flags.config_dir)
    found = hydra_private.candidates(loader, flags.config_name or command, [*flags.overrides, word])
    known = {item.name for item in fields(COMMANDS[command].schema)}
    found = [candidate for candidate in found if re.split(r"[.=/@]", candidate)[0] in known]
    choices = re.compile(r"(\w+)=(\w+)$")
    return [one for one in found if not (pair := choices.match(one)) or fits(command, pair[1], pair[2], loader)]
