"""`corp doctor`: whether corp can work here. One line per check: ok, note or problem, and what to do about it.

Imports torch only inside the checks, so that a broken installation of it is found and not fallen over.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.text import Text

from corp_cli.config.doctor import DoctorConfig
from corp_cli.errors import CorpError
from corp_cli.files.output import require_room
from corp_cli.runtime import console
from corp_cli.runtime.environment import cores, cpu_name, linux
from corp_cli.runtime.hub import in_short, unreachable
from corp_cli.version import __version__

DISTRIBUTION = "corp-cli"
OWN_EXTRAS = ("dev", "train")  # for work on corp itself
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
OFFLINE = "the bundled model, model.checkpoint=FILE and what is in the hub's cache work without it"
GIB = 2**30
LITTLE = 2 * GIB  # of memory or disk
IMAGES, RIGHT = 64, 0.9  # of the self-test, and the share that must be right


@dataclass(frozen=True)
class Check:
    """What was found of one thing: `state` is ok, note (corp works, but) or problem (it does not)."""

    name: str
    state: str
    found: str
    advice: str = ""


def graded(name: str, found: str, advice: str, worst: str = "note") -> Check:
    """What is ok unless there is something to advise."""
    return Check(name, worst if advice else "ok", found, advice)


def check_versions() -> Iterator[Check]:
    """Python, corp, and every package that corp needs, against the ranges in the metadata of the package."""
    yield Check("corp", "ok", __version__)
    try:
        about = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield graded("versions", "corp is not installed as a package, so its ranges are not known", "pip install .")
        return
    python, wanted = platform.python_version(), SpecifierSet(about["Requires-Python"] or "")
    advice = "" if wanted.contains(python, prereleases=True) else "make a new environment with a Python of that range"
    yield graded("Python", f"{python} (needs {wanted})", advice, "problem")
    needed = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    for one in needed:
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            yield check_package(one, "problem")
    yield check_package(Requirement("torchvision"), "problem")  # timm imports it
    for extra in about.get_all("Provides-Extra") or []:
        if extra not in OWN_EXTRAS:
            yield check_extra(extra, needed)


def check_package(needed: Requirement, worst: str) -> Check:
    """Whether one package is there, in a version of the range."""
    install = f"pip install '{needed.name}{needed.specifier}'"
    found = version_of(needed.name)
    if found is None:
        return Check(needed.name, worst, "is not installed", install)
    advice = "" if needed.specifier.contains(found, prereleases=True) else install
    return graded(needed.name, f"{found} (needs {needed.specifier})" if needed.specifier else found, advice, worst)


def check_extra(extra: str, needed: list[Requirement]) -> Check:
    """Whether the packages of an optional extra are there."""
    marked = [one for one in needed if one.marker and one.marker.evaluate({"extra": extra})]
    wanted = [one for one in marked if one.name != DISTRIBUTION]
    bad = [one for one in wanted if check_package(one, "note").state != "ok"]
    if bad:
        install = "pip install " + " ".join(f"'{one.name}{one.specifier}'" for one in bad)
        return graded(extra, f"optional: lacks {', '.join(one.name for one in bad)}", install)
    return Check(extra, "ok", f"optional: {', '.join(f'{one.name} {version_of(one.name)}' for one in wanted)}")


def version_of(package: str) -> str | None:
    """The version of an installed package."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def check_imports() -> Iterator[Check]:
    """Whether torch and timm can be imported: builds that do not fit each other cannot."""
    for module in ("torch", "timm"):
        try:
            import_module(module)
        except Exception as error:
            advice = "install torch and torchvision anew, both from one index and of one release"
            yield Check(module, "problem", f"cannot be imported ({in_short(error)})", advice)
            return


def check_processor() -> Iterator[Check]:
    """The CPU, its cores and threads; a hint where others use them too."""
    import torch

    own = cores()
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    found = f"{cpu_name()}, {count(own, 'core')}, {count(threads, 'thread')}, load {load:.1f}"
    busy = load > own / 2 and threads > 1
    advice = "the machine is busy: OMP_NUM_THREADS=1 makes runs of small models steadier"
    yield graded("CPU", found, advice if busy else "")


def check_devices() -> Iterator[Check]:
    """Every CUDA device with its memory, and MPS; a note where there is a card that torch does not see."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old: is_available is False then
        cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if torch.backends.mps.is_available():
            yield Check("mps", "ok", "available")
        elif cards == 0 and Path("/dev/nvidia0").exists():
            advice = "install a build of torch for the CUDA version that nvidia-smi shows"
            yield graded("CUDA", f"there is a card, but torch {torch.__version__} cannot use it", advice)
        elif cards == 0:
            yield Check("CUDA", "ok", "no device; corp uses the CPU")
        for index in range(cards):
            name = torch.cuda.get_device_name(index)
            free, total = torch.cuda.mem_get_info(index)
            found = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            yield graded(f"cuda:{index}", found, "close what uses it" if free < LITTLE else "")


def check_memory() -> Iterator[Check]:
    """Memory that is free, and in all."""
    sizes = linux("meminfo")
    if "MemAvailable" not in sizes:
        yield Check("memory", "ok", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB")
        return
    free, total = (int(sizes[key].split()[0]) * 2**10 for key in ("MemAvailable", "MemTotal"))
    advice = "close other programs, or use compensation.propagate=none and smaller batches" if free < LITTLE else ""
    yield graded("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", advice)


def check_disk() -> Iterator[Check]:
    """Space in the current folder, and whether `outputs/` can be written."""
    folder = Path("outputs")
    try:
        require_room(folder)
        free = shutil.disk_usage(Path.cwd()).free
    except (CorpError, OSError) as error:
        yield Check("output", "problem", in_short(error))
        return
    advice = "make room, or set hydra.run.dir to another folder" if free < LITTLE else ""
    yield graded("output", f"{folder}/ can be written, {free / GIB:.1f} GiB free", advice)


def check_hub() -> Iterator[Check]:
    """Whether weights can be kept in the hub's cache, and fetched."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            yield Check("hub cache", "ok", f"{cache} can be written")
    except OSError as error:
        yield graded("hub cache", f"{cache} cannot be written ({in_short(error)})", "set HF_HOME to a folder")
    if constants.HF_HUB_OFFLINE:
        yield graded("hub", "HF_HUB_OFFLINE is set, so nothing is fetched", OFFLINE)
    elif (failure := unreachable(constants.ENDPOINT)) is None:
        yield Check("hub", "ok", f"{constants.ENDPOINT} answers")
    else:
        yield graded("hub", f"{constants.ENDPOINT} is out of reach ({failure})", OFFLINE)


def check_itself() -> Iterator[Check]:
    """Whether the bundled model classifies its images on the device that `device=auto` takes."""
    import torch

    from corp_cli.config.images import EvaluationConfig
    from corp_cli.config.prune import ModelConfig
    from corp_cli.images.batches import resolve_device
    from corp_cli.models.bundled import BUNDLED
    from corp_cli.models.loading import load_dense
    from corp_cli.prepare.batches import first_batch
    from corp_cli.prepare.images import asked_images, head_of

    device = resolve_device("auto")
    model, spec = load_dense(ModelConfig())
    path = str(BUNDLED[ModelConfig().name].evaluation)
    images = asked_images(EvaluationConfig(num_images=IMAGES), path, head_of(model), seed=0)
    start = time.perf_counter()
    with torch.inference_mode():
        answers = model.to(device)(first_batch(images, IMAGES, spec, device)).argmax(-1).tolist()
    right = sum(answer == label for answer, label in zip(answers, images.labels or (), strict=True))
    seconds = time.perf_counter() - start
    found = f"the bundled model is right on {right} of {IMAGES} digits, on {device} in {seconds:.2f} s"
    advice = "install corp and torch anew; try device=cpu" if right < RIGHT * IMAGES else ""
    yield graded("self-test", found, advice, "problem")


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_versions,
    check_imports,
    check_processor,
    check_devices,
    check_memory,
    check_disk,
    check_hub,
    check_itself,
)


def examine() -> Iterator[Check]:
    """Every check; one that fails itself is a problem."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.removeprefix("check_")
            yield Check(name, "problem", f"cannot be checked ({in_short(error)})", "install corp and torch anew")


def count(number: int, what: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def run(cfg: DoctorConfig, output_dir: Path) -> None:
    """`corp doctor`: show every check as it is done. Raises CorpError where something is broken that corp needs."""
    out, problems = console.out(), []
    for check in examine():
        advice = f"; {check.advice}" if check.advice else ""
        rest = f" {check.name:<12} {check.found}{advice}"
        out.print(Text.assemble((f"{check.state:<8}", STYLES[check.state]), rest))
        if check.state == "problem":
            problems.append(check.name)
    sys.stdout.flush()
    if problems:
        raise CorpError(f"Something that corp needs is broken: {', '.join(problems)}; see what the lines above advise.")
    out.print("corp can work here.")
