"""Images in batches: chosen with a seed, decoded and preprocessed in threads, the broken ones left out and counted."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # Python's own only from 3.11 on
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from corp_cli.errors import CorpError
from corp_cli.images.decode import FORMATS, from_tensor, nearly_black, require_bounds
from corp_cli.images.sources import ImageSet, Sample
from corp_cli.runtime import console, ranks
from corp_cli.runtime.environment import cores
from corp_cli.runtime.memory import is_out_of_memory

Transform = Callable[[Image.Image], Tensor]
SILENCE = 120.0  # seconds that one image may take, even from a slow disk
READERS = 4  # more decode faster, and keep the thread that calls the GPU from Python's lock
AHEAD = 2  # batches that may be ready: evens out images that are slow to decode
LARGE = 2**25  # pixels from which an image that memory does not suffice for is itself to blame


@dataclass
class Intake:
    """What came of reading images: how many were good, and why the others were not. Filled by `batches`.

    More than `allowed` bad images raise CorpError, which names `where` they are and the `key` of the limit.
    """

    where: str
    key: str
    allowed: int
    good: int = 0
    dim: int = 0  # how many of the good ones are nearly black for want of scaling
    bad: list[str] = field(default_factory=list)  # one sentence each

    def restart(self) -> None:
        """Forget what was read, before reading anew."""
        self.good, self.dim, self.bad = 0, 0, []

    def take(self, good: int, bad: list[str], dim: int = 0) -> None:
        """Count one more batch."""
        self.good += good
        self.dim += dim
        self.bad += bad
        if len(self.bad) > self.allowed:
            seen = self.good + len(self.bad)
            raise CorpError(
                f"{self.where} holds images that cannot be read, {len(self.bad)} of the first {seen}, first "
                f"{self.bad[0]}; remove them, or allow a larger fraction with {self.key}."
            )


def require_good(intake: Intake) -> None:
    """Say how many images could not be read. Raises CorpError when that was all of them."""
    if intake.good == 0:
        raise CorpError(f"{intake.where} holds no image that can be read, first {intake.bad[0]}; give other images.")
    warn_unread(intake)


def warn_unread(intake: Intake) -> None:
    """Say how many images could not be read, if any, and whether most are nearly black."""
    if 2 * intake.dim > intake.good:
        console.warn(
            f"{intake.dim} of {intake.good} images of {intake.where} have 16 bits, look nearly black and hold no value "
            "above 4095; if they are of 12 bits, scale them to 16 or save them with 8."
        )
    if intake.bad:
        total = intake.good + len(intake.bad)
        console.warn(f"{len(intake.bad)} of {total} images of {intake.where} cannot be read, first {intake.bad[0]}.")


def choose(images: ImageSet, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """(chosen, rest): `count` images drawn with `seed`, spread evenly over sub-folders; all where there are fewer."""
    generator = random.Random(seed)
    by_folder: dict[str, list[int]] = {}
    for index, folder in enumerate(images.folders):
        by_folder.setdefault(folder, []).append(index)
    queues = list(by_folder.values())
    for queue in queues:
        generator.shuffle(queue)
    generator.shuffle(queues)
    rounds = range(max(map(len, queues), default=0))
    order = [queue[r] for r in rounds for queue in queues if r < len(queue)]
    return images.subset(sorted(order[:count])), images.subset(sorted(order[count:]))


@dataclass(frozen=True)
class _Read:
    """One preprocessed image with its class(es)."""

    image: Tensor
    label: int | tuple[int, ...]
    dim: bool


def _load(images: ImageSet, transform: Transform | None, index: int) -> _Read | str:
    """Image `index` with its label; for one that cannot be read, a sentence that says so."""
    item, size = images.items[index], 0
    if transform is None:
        assert isinstance(item, Tensor)
        return _Read(item, -1 if images.labels is None else images.labels[index], dim=False)
    try:
        image, own = _open(item)
        with image:
            size = image.width * image.height
            require_bounds(image)
            pixels = transform(image)
            dim = nearly_black(item if isinstance(item, Tensor) else image)
    except Exception as error:  # Pillow's readers have no common ancestor for their errors
        if is_out_of_memory(error) and size < LARGE:
            raise
        why = str(error).split("\n")[0] or type(error).__name__
        return console.readable(f"{item} ({why})")
    return _Read(pixels, own if images.labels is None else images.labels[index], dim)


def _open(item: Path | Tensor | Sample) -> tuple[Image.Image, int]:
    """The image, perhaps not decoded yet, and the class that came with it, -1 where none did."""
    if isinstance(item, Tensor):
        return from_tensor(item), -1
    if isinstance(item, Sample):
        return item.reader.read(item.index)
    if item.exists() and not item.is_file():  # a pipe would be waited for without end
        raise ValueError("not a regular file")
    return Image.open(item, formats=FORMATS), -1


Asked = tuple[int, Future[_Read | str]]


def _read_ahead(
    images: ImageSet, load: Callable[[int], _Read | str], workers: int, ahead: int
) -> Iterator[_Read | str]:
    """load(index) for all `images` in order, done by threads that are at most `ahead` images ahead.

    Threads: Pillow decodes and resizes without Python's lock, and processes would hand images over in shared memory,
    of which containers have little. They are daemons: one that waits for a dead disk keeps nobody from ending.
    """
    queue: SimpleQueue[Asked | None] = SimpleQueue()

    def work() -> None:
        while task := queue.get():
            index, answer = task
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(load(index))
                except BaseException as error:
                    answer.set_exception(error)

    def ask(index: int) -> Asked:
        task: Asked = index, Future()
        queue.put(task)
        return task

    tasks, running, threads = map(ask, range(len(images))), deque[Asked](), list[Thread]()
    patience = 5.0  # Python ends badly while threads are in native code
    try:
        for _ in range(workers):
            thread = Thread(target=work, daemon=True)
            thread.start()
            threads.append(thread)
        running.extend(islice(tasks, ahead))
        while running:
            index, answer = running.popleft()
            try:
                found = answer.result(SILENCE)
            except Late as error:
                patience = 0.0
                why = (
                    f"Reading {images.items[index]} has taken {SILENCE:.0f} s; check the disk or network that it is on."
                )
                raise CorpError(why) from error
            running.extend(islice(tasks, 1))
            yield found
    finally:
        for _, answer in running:
            answer.cancel()
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join(patience)


def _collate(samples: list[_Read | str], pin_memory: bool) -> tuple[Tensor | None, Tensor, int, list[str]]:
    """(images, labels, how many are dim, what is wrong with the others)."""
    read = [sample for sample in samples if not isinstance(sample, str)]
    images = stacked([sample.image for sample in read]) if read else None
    if images is not None and pin_memory:
        images = images.pin_memory()
    labels, bad = torch.tensor([sample.label for sample in read]), [s for s in samples if isinstance(s, str)]
    return images, labels, sum(sample.dim for sample in read), bad


def stacked(images: list[Tensor]) -> Tensor:
    """[B, C, H, W] of images [C, H, W], in the order in memory that the first has: pixels lie as they were decoded.

    By NumPy, which copies alone: PyTorch's threads, once called, wait for more to do where readers could work.
    """
    order = sorted(range(3), key=lambda dim: images[0].stride(dim), reverse=True)
    copied = torch.from_numpy(np.stack([image.permute(order).numpy() for image in images]))
    return copied.permute(0, *(1 + order.index(dim) for dim in range(3)))


def readers(asked: int | None) -> int:
    """How many threads load images: as many as `asked`, or one a core, at most `READERS`; processes share the cores."""
    if asked is not None:
        return asked
    return max(1, min(READERS, cores() // ranks.count()))


def batches(
    images: ImageSet,
    transform: Transform | None,
    batch_size: int,
    num_workers: int | None,
    pin_memory: bool = False,
    intake: Intake | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ([B, C, H, W], labels), in the order of `images`, decoded in `num_workers` threads; see `readers`.

    `transform` makes a tensor of an opened image; None: `images` are prepared. labels are [B], -1 where unknown, or
    [B, L] where an image has several right classes, filled up with -1.
    Images that cannot be read are left out, so that a batch may be smaller, and put down in `intake`; without one,
    and where there are more than it allows, they raise CorpError.
    """
    if len(images) == 0:
        return
    first = images.items[0]
    alone = isinstance(first, Tensor) or (isinstance(first, Sample) and first.reader.in_order)
    workers = 0 if alone else min(readers(num_workers), len(images))
    load = partial(_load, images, transform)
    read = (
        _read_ahead(images, load, workers, AHEAD * (batch_size + workers)) if workers else map(load, range(len(images)))
    )
    while samples := list(islice(read, batch_size)):
        tensors, labels, dim, bad = _collate(samples, pin_memory)
        samples.clear()  # the batch is a copy
        if intake is not None:
            intake.take(len(labels), bad, dim)
        elif bad:
            raise CorpError(f"{bad[0]} cannot be read as an image; remove or replace it.")
        if tensors is not None:
            yield tensors, labels


def own_batches(
    images: ImageSet,
    own: range,
    transform: Transform | None,
    batch_size: int,
    num_workers: int | None,
    pin_memory: bool,
    intake: Intake,
) -> Iterator[tuple[Tensor, Tensor]]:
    """`batches` of those of `images` that are this process's `own`; `intake` is in the end of those of all."""
    read = replace(intake, bad=list(intake.bad))
    yield from batches(images.subset(own), transform, batch_size, num_workers, pin_memory, read)
    for found in ranks.gathered((read.good - intake.good, read.bad[len(intake.bad) :], read.dim - intake.dim)):
        intake.take(*found)


def batch_count(images: ImageSet, batch_size: int) -> int:
    """How many batches `batches` gives, but for those without a good image."""
    return -(-len(images) // batch_size)


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA, else MPS, else the CPU; of several processes each has a GPU of its own.

    Raises CorpError for a device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and ranks.count() > 1 and torch.cuda.is_available():
        return ranks.device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CorpError(f"device={name} is not a device; use auto, cpu, cuda, cuda:1 or mps.") from error
    there = device.type == "cpu"
    if device.index is not None and ranks.count() > 1:
        raise CorpError(f"device={name} is one GPU, and each of several processes needs its own; leave out the number.")
    if device.type == "cuda":
        there = (device.index or 0) < torch.cuda.device_count()
    elif device.type == "mps":
        there = torch.backends.mps.is_available()
    if not there:
        raise CorpError(f"device={name} is not available on this machine; use device=auto or device=cpu.")
    return device
