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
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.text import Text

from corp_cli.config.prune import DoctorConfig
from corp_cli.errors import CorpError
from corp_cli.files.output import require_room
from corp_cli.runtime import console
from corp_cli.version import __version__

DISTRIBUTION = "corp-cli"
OWN_EXTRAS = ("dev", "train")  # for work on corp itself
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
OFFLINE = "the bundled model, model.checkpoint=FILE and what is in the hub's cache work without it"
GIB = 2**30
LITTLE = 2 * GIB  # of memory or disk
HUB_SECONDS = 3.0
IMAGES, RIGHT = 64, 0.9  # of the self-test, and the share that must be right


@dataclass(frozen=True)
class Check:
    """What was found of one thing: `state` is ok, note (corp works, but) or problem (it does not)."""

    name: str
    state: str
    found: str
    advice: str = ""


# --- versions -------------------------------------------------------------------------------------------------


def check_versions() -> Iterator[Check]:
    """Python, corp, and every package that corp needs, against the ranges in the metadata of the package."""
    yield Check("corp", "ok", __version__)
    try:
        about = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield Check(
            "versions", "note", "corp is not installed as a package, so its ranges are not known", "pip install ."
        )
        return
    python, wanted = platform.python_version(), SpecifierSet(about["Requires-Python"] or "")
    fits = wanted.contains(python, prereleases=True)
    advice = "" if fits else "make a new environment with a Python of that range"
    yield Check("Python", "ok" if fits else "problem", f"{python} (needs {wanted})", advice)
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
    if not needed.specifier.contains(found, prereleases=True):
        return Check(needed.name, worst, f"{found} (needs {needed.specifier})", install)
    return Check(needed.name, "ok", f"{found} (needs {needed.specifier})" if needed.specifier else found)


def check_extra(extra: str, needed: list[Requirement]) -> Check:
    """Whether the packages of an optional extra are there."""
    wanted = [one for one in needed if one.marker and one.marker.evaluate({"extra": extra})]
    wanted = [one for one in wanted if one.name != DISTRIBUTION]
    found = {one.name: version_of(one.name) for one in wanted}
    bad = [one for one in wanted if check_package(one, "note").state != "ok"]
    if bad:
        install = "pip install " + " ".join(f"'{one.name}{one.specifier}'" for one in bad)
        return Check(extra, "note", f"optional: lacks {', '.join(one.name for one in bad)}", install)
    return Check(extra, "ok", f"optional: {', '.join(f'{name} {version}' for name, version in found.items())}")


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


# --- the machine ----------------------------------------------------------------------------------------------


def check_processor() -> Iterator[Check]:
    """The CPU, its cores and threads; a hint where others use them too."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    found = f"{processor()}, {count(cores, 'core')}, {count(threads, 'thread')}, load {load:.1f}"
    if load > cores / 2 and threads > 1:
        yield Check("CPU", "note", found, "the machine is busy: OMP_NUM_THREADS=1 makes runs of small models steadier")
    else:
        yield Check("CPU", "ok", found)


def processor() -> str:
    """The name of the CPU's model, as far as the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
            yield Check("CUDA", "note", f"there is a card, but torch {torch.__version__} cannot use it", advice)
        elif cards == 0:
            yield Check("CUDA", "ok", "no device; corp uses the CPU")
        for index in range(cards):
            name = torch.cuda.get_device_name(index)
            free, total = torch.cuda.mem_get_info(index)
            found = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            little = free < LITTLE
            yield Check(f"cuda:{index}", "note" if little else "ok", found, "close what uses it" if little else "")


def check_memory() -> Iterator[Check]:
    """Memory that is free, and in all."""
    sizes: dict[str, int] = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            key, _, value = line.partition(":")
            sizes[key] = int(value.split()[0]) * 2**10
    if "MemAvailable" not in sizes:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Check("memory", "ok", f"{total / GIB:.1f} GiB")
        return
    free = sizes["MemAvailable"]
    found = f"{free / GIB:.1f} of {sizes['MemTotal'] / GIB:.1f} GiB free"
    advice = "close other programs, or use compensation.propagate=none and smaller batches" if free < LITTLE else ""
    yield Check("memory", "note" if advice else "ok", found, advice)


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
    yield Check("output", "note" if advice else "ok", f"{folder}/ can be written, {free / GIB:.1f} GiB free", advice)


# --- the hub --------------------------------------------------------------------------------------------------


def check_hub() -> Iterator[Check]:
    """Whether weights can be kept in the hub's cache, and fetched."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            yield Check("hub cache", "ok", f"{cache} can be written")
    except OSError as error:
        yield Check("hub cache", "note", f"{cache} cannot be written ({in_short(error)})", "set HF_HOME to a folder")
    if constants.HF_HUB_OFFLINE:
        yield Check("hub", "note", "HF_HUB_OFFLINE is set, so nothing is fetched", OFFLINE)
    elif (failure := unreachable(constants.ENDPOINT)) is None:
        yield Check("hub", "ok", f"{constants.ENDPOINT} answers")
    else:
        yield Check("hub", "note", f"{constants.ENDPOINT} is out of reach ({failure})", OFFLINE)


def unreachable(url: str) -> str | None:
    """Why `url` does not answer a HEAD request within HUB_SECONDS; None if it does."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_SECONDS):
            return None
    except Exception as error:  # of many kinds: no route, a proxy, a certificate, not a URL
        reason = getattr(error, "reason", error)
        return in_short(reason) if isinstance(reason, Exception) else str(reason)


# --- the whole ------------------------------------------------------------------------------------------------


def check_itself() -> Iterator[Check]:
    """Whether the bundled model classifies its images on the device that `device=auto` takes."""
    import torch

    from corp_cli.config.images import EvaluationConfig
    from corp_cli.config.prune import ModelConfig
    from corp_cli.images.batches import resolve_device
    from corp_cli.models.bundled import BUNDLED
    from corp_cli.models.loading import load_dense
    from corp_cli.prepare import asked_images, first_batch, head_of

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
    if right < RIGHT * IMAGES:
        yield Check("self-test", "problem", found, "install corp and torch anew; try device=cpu")
    else:
        yield Check("self-test", "ok", found)


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


def in_short(error: Exception) -> str:
    """The first line of an error, after its type where that is all there is."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def count(number: int, what: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def line(check: Check) -> Text:
    """How a check is shown."""
    advice = f"; {check.advice}" if check.advice else ""
    return Text.assemble((f"{check.state:<8}", STYLES[check.state]), f" {check.name:<12} {check.found}{advice}")


def run(cfg: DoctorConfig, output_dir: Path) -> None:
    """`corp doctor`: show every check as it is done. Raises CorpError where something is broken that corp needs."""
    out, problems = console.out(), []
    for check in examine():
        out.print(line(check))
        if check.state == "problem":
            problems.append(check.name)
    sys.stdout.flush()
    if problems:
        raise CorpError(f"Something that corp needs is broken: {', '.join(problems)}; see what the lines above advise.")
    out.print("corp can work here.")
