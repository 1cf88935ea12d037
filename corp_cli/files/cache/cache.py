"""What runs need not do again: one cache, in which statistics, damage curves and blocks are kept under one key.

Of several processes the first alone reads and writes it; what it finds, all have found.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol, TypeVar

from corp_cli.errors import CorpError
from corp_cli.files.cache.blocks import BlockFiles
from corp_cli.files.cache.curves import KeptCurves, read_curves, write_curves
from corp_cli.files.cache.keys import differing, extended, key_sha256, statistics_key
from corp_cli.files.cache.scores import LossFiles
from corp_cli.files.cache.statistics import Measured, read_statistics, write_statistics
from corp_cli.files.kept import DamagedError, ForeignError, Key
from corp_cli.files.locks import in_turn
from corp_cli.images.batches import Intake, warn_unread
from corp_cli.images.sources import ImageSet, expand
from corp_cli.method.calibrate import statistics_device
from corp_cli.method.statistics import Statistics
from corp_cli.models.blocks import GROUPS, Block
from corp_cli.models.loaded import LoadedModel
from corp_cli.runtime import console, ranks
from corp_cli.sizes.curves import Curve

WRITTEN = 4e8  # bytes a second, with their checksum


class Keyed(Protocol):
    """What is kept under a key."""

    @property
    def key(self) -> Key:
        """What it depends on, by name."""


K = TypeVar("K", bound=Keyed)


@dataclass(frozen=True)
class Cache:
    """Where things are kept, if anywhere, and `key`: what statistics depend on; see `opened`.

    shared: a folder, or a file of statistics, for every run; one that cannot be written ends the run, since somebody
    asked for it. own: a folder for this run alone, should it be interrupted; it can do without. found_out() gives the
    key, which takes seconds of large models, when it is first needed.
    """

    shared: Path | None = None
    own: Path | None = None
    found_out: Callable[[], Key] = dict

    @cached_property
    def key(self) -> Key:
        """What statistics depend on, by name."""
        return self.found_out()

    @property
    def place(self) -> Path | None:
        """Where statistics and curves are."""
        return self.shared or self.own


def opened(
    cache: Cache,
    asked: str | None,
    dense: LoadedModel,
    images: tuple[ImageSet, ...],
    groups: frozenset[str],
    precision: str,
    weighs: bool = False,
) -> Cache:
    """`cache` for a run that prunes `groups` of `dense` by `images` in `precision`; `asked`, where given, is the shared
    one. weighs: whether logits are weighted, see RunningLogits."""
    shared = expand(asked) if asked else cache.shared
    own = cache.own if cache.own and has_room(cache.own, dense.blocks) else None
    if shared is None and own is None:
        return Cache()
    weighs = weighs and "qk" in groups and any(b.bare_logits and "qk" not in b.refusals for b in dense.blocks)
    found_out = partial(statistics_key, dense, images, groups, precision, weighs)
    return Cache(shared, own, found_out if ranks.count() == 1 else partial(dict, found_out()))  # others are told it


def has_room(folder: Path, blocks: tuple[Block, ...]) -> bool:
    """Whether the disk takes twice what the statistics of `blocks` take: a run that has no room goes on without."""
    existing = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    return shutil.disk_usage(existing).free > 2 * bytes_of(blocks)


def bytes_of(blocks: tuple[Block, ...]) -> int:
    """What the statistics of `blocks` take at most."""
    widths = [(b.sizes.mlp, b.sizes.heads * b.sizes.vo, b.sizes.heads, b.sizes.qk) for b in blocks]
    return 8 * sum(mlp**2 + vo**2 + 5 * heads * qk**2 for mlp, vo, heads, qk in widths)


def cached_statistics(
    cache: Cache, dense: LoadedModel, intake: Intake, measure: Callable[[], Statistics]
) -> Statistics:
    """What `measure` gives, looked up in or added to `cache`; `intake` says how many images it was measured on."""
    if cache.place is None:
        return measure()
    if cache.shared is None and ranks.once(holds_none, cache.place):  # before anything is known of the key
        return measured(cache, dense, intake, measure)
    named = cache.place.suffix == ".safetensors"
    own = cache.place if named else in_cache(cache, "statistics", cache.key)
    others = () if named or own.is_file() else with_more(cache.key)
    key = next((one for one in others if in_cache(cache, "statistics", one).is_file()), cache.key)
    path = own if key == cache.key else in_cache(cache, "statistics", key)
    with turn(cache, path, "measuring the same statistics"):
        try:
            home = statistics_device(dense.model)
            more = ({**key, "logits": "weighted"},) if named else ()
            found = ranks.once(found_in, cache, path, key, lambda: read_statistics(path, home), more)
        except ForeignError as error:
            console.warn(f"calibration.cache: {path} {error}; measuring without it.")
            return measure()
        if found is not None:
            intake.restart()
            intake.take(found.good, found.bad)
            warn_unread(intake)
            console.err().print(f"corp: statistics of {found.good} images read from {path}", style="dim", markup=False)
            return of_groups(found.statistics, cache.key["groups"])
        return measured(cache, dense, intake, measure, own)


def holds_none(folder: Path) -> bool:
    """Whether no statistics are kept in `folder`."""
    return not any(folder.glob("statistics-*"))


def measured(
    cache: Cache, dense: LoadedModel, intake: Intake, measure: Callable[[], Statistics], path: Path | None = None
) -> Statistics:
    """What `measure` gives, added to `cache` at `path`, by default that of its key."""
    begin = time.perf_counter()
    statistics = measure()
    taken = ranks.once(lambda: time.perf_counter() - begin)  # all processes decide alike
    if cache.shared is None and bytes_of(dense.blocks) / WRITTEN > taken:
        return statistics  # a run that goes on would measure anew in the time that this one would take to write
    path = path or in_cache(cache, "statistics", cache.key)
    keep(cache, lambda: write_statistics(Measured(cache.key, statistics, intake.good, intake.bad), path))
    return statistics


def with_more(key: Key) -> Iterator[Key]:
    """The keys of statistics that hold more than those of `key`: for other groups as well, or of weighted logits."""
    asked = {*filter(None, key["groups"].split(","))}
    for count in range(len(asked), len(GROUPS) + 1):
        for groups in combinations(sorted(GROUPS), count):
            if asked <= {*groups}:
                wider = {**key, "groups": ",".join(groups)}
                weighted = {**wider, "logits": "weighted"}
                yield from (one for one in (wider, weighted) if one != key)


def of_groups(statistics: Statistics, groups: str) -> Statistics:
    """`statistics` without what was measured for other groups."""
    of = {"hidden": ("mlp",), "logits": ("qk",), "head_output": ("vo", "heads")}
    others = {name: None for name, needed in of.items() if not {*needed} & {*groups.split(",")}}
    return tuple(replace(block, **others) for block in statistics)


def cached_curves(cache: Cache, parts: dict[str, Any], measure: Callable[[], list[Curve]]) -> list[Curve]:
    """What `measure` gives, looked up in or added to `cache`; `parts`: what curves depend on besides statistics."""
    if cache.place is None:
        return measure()
    key = extended(cache.key, **parts)
    path = in_cache(cache, "curves", key)
    with turn(cache, path, "measuring the same damage curves"):
        found = ranks.once(found_in, cache, path, key, lambda: read_curves(path))
        if found is not None:
            console.err().print(f"corp: damage curves read from {path}", style="dim", markup=False)
            return found.curves
        curves = measure()
        keep(cache, lambda: write_curves(KeptCurves(key, curves), path))
    return curves


def found_in(cache: Cache, path: Path, key: Key, read: Callable[[], K], others: tuple[Key, ...] = ()) -> K | None:
    """What `read` finds in `path`; None, and a word on why, where that is nothing, or not what was kept under `key`.

    `others` do as well.
    Raises ForeignError for a file that the user named, and that corp did not write: it is left alone.
    """
    if not path.exists():
        return None
    try:
        found = read()
        if found.key in (key, *others):
            return found
        why = f"was measured for other {differing(key, found.key)}"
    except (ForeignError, DamagedError) as error:
        if isinstance(error, ForeignError) and path == cache.place:
            raise
        why = str(error)
    console.warn(f"calibration.cache: {path} {why}; measuring anew and replacing it.")
    return None


def turn(cache: Cache, path: Path, doing: str) -> contextlib.AbstractContextManager[None]:
    """The time in which this run alone reads or makes `path`, of a cache that others share."""
    return in_turn(path, doing) if cache.shared is not None and ranks.leads() else contextlib.nullcontext()


def cached_blocks(cache: Cache, parts: dict[str, Any]) -> BlockFiles | None:
    """Where blocks of this run are kept; `parts`: what they depend on besides statistics. None without such a place."""
    return None if cache.own is None else BlockFiles(cache.own, extended(cache.key, **parts))


def cached_losses(cache: Cache, parts: dict[str, Any]) -> LossFiles | None:
    """Where the losses of masked units are kept; `parts`: what they depend on besides statistics. None without one."""
    if cache.place is None:
        return None
    key = extended({name: part for name, part in cache.key.items() if name != "logits"}, **parts)
    return LossFiles(in_cache(cache, "trajectory", key).parent, key)


def in_cache(cache: Cache, kind: str, key: Key) -> Path:
    """The file for `key` in the cache's folder, or beside the file of statistics that it names."""
    assert cache.place is not None
    folder = cache.place.parent if cache.place.suffix == ".safetensors" else cache.place
    return folder / f"{kind}-{key_sha256(key)[:16]}.safetensors"


def keep(cache: Cache, write: Callable[[], None]) -> None:
    """Let `write` add a file; what a run keeps for itself alone it can do without."""
    try:
        ranks.once(write)
    except CorpError as error:
        if cache.shared is not None:
            raise CorpError(f"calibration.cache: {error}") from error
