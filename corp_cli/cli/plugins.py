"""Hydra's launchers and sweepers that come as packages of their own, and what corp knows of them."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, ListConfig

from corp_cli.config.outcome import OBJECTIVES, names_in
from corp_cli.errors import CorpError

PACKAGES = {
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
    "hydra/launcher/ray": "hydra-ray-launcher",
    "hydra/launcher/ray_aws": "hydra-ray-launcher",
    "hydra/launcher/rq": "hydra-rq-launcher",
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/sweeper/ax": "hydra-ax-sweeper",
    "hydra/sweeper/nevergrad": "hydra-nevergrad-sweeper",
}


def not_installed(group: str, choice: str) -> str | None:
    """What to do where Hydra does not know this choice since its package is missing; None where it is no package's."""
    package = PACKAGES.get(f"{group}/{choice}")
    return package and f"{group}={choice} needs a package that is not installed; run: pip install {package}"


def require_objective(command: str, master: DictConfig) -> None:
    """Raise CorpError where a sweeper of a package would have no number of each job to go by, or go the wrong way."""
    sweeper = master.hydra.runtime.choices.get("hydra/sweeper")
    if f"hydra/sweeper/{sweeper}" not in PACKAGES:
        return
    value = master.get("objective")
    names = names_in(list(value) if isinstance(value, ListConfig) else value)
    if command != "prune":
        raise CorpError(
            f"hydra/sweeper={sweeper} needs a number of every job, which only corp prune gives; leave it out."
        )
    if not names or master.dry_run:
        other = "leave out --dry-run" if names else f"set objective to {', '.join(OBJECTIVES)} or a list of two"
        raise CorpError(f"hydra/sweeper={sweeper} goes by a number of every run; {other}.")
    if sweeper == "optuna":
        require_directions(names, master.hydra.sweeper.direction)


def require_directions(names: list[str], given: Any) -> None:
    """Raise CorpError unless `given`, hydra.sweeper.direction of optuna, goes to the better side of every number."""
    found = [getattr(one, "name", one) for one in (given if isinstance(given, ListConfig) else [given])]
    better = [OBJECTIVES[name] for name in names if name in OBJECTIVES]  # others are refused by name
    if found != better and len(better) == len(names):
        shown = [text if len(names) == 1 else f"[{text}]" for text in (",".join(names), ",".join(better))]
        raise CorpError(f"objective={shown[0]} wants hydra.sweeper.direction={shown[1]}, and it is {','.join(found)}.")
