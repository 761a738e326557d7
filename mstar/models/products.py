"""Products: finds out which kernels multiply weights of some shapes fastest, and remembers it.

For products of few rows and of very many, the kernel that cuBLASLt would take itself is up to a
seventh slower than another of the thirty that it has; which one cannot be told but by trying.
"""

import json
import logging
import re
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from mstar.models.cublaslt import DTYPES, Library, Product
from mstar.models.files import alone, atomic_write, default_cache_dir

logger = logging.getLogger(__name__)

Kernel = Callable[[Tensor, Tensor, Tensor], bool]
"""Writes ``x @ weight.T``; see ``Product.kernel``."""

_LEAST_ROWS = 16
_RECORDED_UP_TO = 256
"""Rows up to which products take the device less time than launching them takes the CPU."""
_HOT_FROM = 256
"""Rows from which products heat the device until its clock falls."""
_MIN_WEIGHT_NBYTES = 4 << 20
"""Smaller weights are read too fast for the kernel to matter."""
_FAILURES = (OSError, AttributeError, RuntimeError)
"""How the library, the device or its memory fail."""
_GAIN = 0.98
"""A kernel is taken if it needs at most this share of the time that torch's needs."""
_NUM_FINALISTS = 4
_NUM_ROUNDS = 5
_WEIGHTS, _WEIGHTS_OF_LARGE = 16, 4
"""Weights that are read in turn, so that none is found in the device's cache."""
_NUM_COMPARED = 128
"""First and last rows that are held against torch's product; all would take a step's memory."""
_AGREEMENT = 1e-2
"""Norm of the difference to torch's product, as a share of the norm of it."""


def bounds(sizes: Iterable[int], most: int = 0) -> list[int]:
    """Return the numbers of rows to choose kernels for, ascending.

    Each serves down to half of it; one row has a kernel of its own.

    Args:
        sizes: Of decode steps.
        most: Of the largest step.

    >>> bounds([1, 2, 40, 200], 3000)
    [16, 64, 256, 512, 1024, 2048, 3000]
    """
    found = {max(_LEAST_ROWS, 1 << (size - 1).bit_length()) for size in sizes if size > 1}
    if most > _RECORDED_UP_TO:
        found |= {2**n for n in range(most.bit_length()) if _RECORDED_UP_TO < 2**n < most} | {most}
    return sorted(found)


class Kernels:
    """The kernels of products of weights of one shape.

    Args:
        by_rows: By the most rows that they are for; ``None``: torch's own.
    """

    def __init__(self, by_rows: Mapping[int, Kernel | None]) -> None:
        self._bounds = sorted(by_rows)
        self._kernels = [by_rows[bound] for bound in self._bounds]

    def find(self, num_rows: int) -> Kernel | None:
        """Return the kernel for so many rows; ``None``: torch's own."""
        place = bisect_left(self._bounds, num_rows)
        if place == len(self._bounds):
            return None
        bound = self._bounds[place]
        return self._kernels[place] if bound == _LEAST_ROWS or 2 * num_rows > bound else None


class Choices:
    """What was chosen on devices of one kind with one version of the library.

    Args:
        path: Where it is remembered.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._read()

    def _read(self) -> dict[str, str]:
        with suppress(OSError, ValueError):
            known = json.loads(self._path.read_bytes())
            if isinstance(known, dict):
                return {k: v for k, v in known.items() if isinstance(v, str)}
        return {}

    @classmethod
    def of(cls, library: Library, cache_dir: Path | None = None) -> "Choices":
        """Return what is remembered of a library and its device."""
        device = re.sub(r"\W+", "-", torch.cuda.get_device_name(library.device))
        name = f"{device}-cublaslt-{library.version}.json"
        return cls((cache_dir or default_cache_dir()) / "products" / name)

    def __getitem__(self, key: str) -> bytes | None:
        """Return an algorithm, empty for torch's own; ``None``: nothing was chosen yet."""
        try:
            return bytes.fromhex(self._known[key])
        except (KeyError, ValueError):
            return None

    def __setitem__(self, key: str, algo: bytes) -> None:
        self._known[key] = algo.hex()

    def write(self, keys: Iterable[str]) -> bool:
        """Remember some choices, and whatever others chose meanwhile; returns whether that went.

        Args:
            keys: Of the choices that are new.
        """
        try:
            with alone(self._path.with_suffix(".lock")):
                known = self._read() | {key: self._known[key] for key in keys}
                with atomic_write(self._path) as file:
                    file.write(json.dumps(known, indent=0).encode())
        except OSError as error:
            logger.debug("chosen kernels are not remembered: %s", error)
            return False
        return True


def choose(
    groups: Sequence[Sequence[Tensor]], num_rows: Sequence[int], cache_dir: Path | None = None
) -> list[Kernels | None]:
    """Return the kernels of several groups of weights.

    What is remembered from another start is not tried again, so that the same kernels give the
    same bits.

    Args:
        groups: Weights ``[out_features, in_features]`` of one shape, dtype and CUDA device each.
        num_rows: As ``bounds`` gives them.
        cache_dir: Where choices are remembered; ``None``: the default one.

    Returns:
        One a group; ``None`` where torch's own are good enough.
    """
    device = groups[0][0].device
    library = _library(torch.cuda.current_device() if device.index is None else device.index)
    if library is None:
        return [None] * len(groups)
    chooser = _Chooser(library, Choices.of(library, cache_dir))
    found = [chooser.kernels(group, num_rows) for group in groups]
    chooser.finish()
    return found


@cache
def _library(index: int) -> Library | None:
    """Return the library for a device, the same again: recorded products use its memory."""
    try:
        return Library(torch.device("cuda", index))
    except _FAILURES as error:
        logger.info("products take the kernels that torch chooses: %s", error)
        return None


class _Chooser:
    """Makes choices, or finds them made.

    Args:
        library: The library.
        choices: What is remembered.
    """

    def __init__(self, library: Library, choices: Choices) -> None:
        self._library = library
        self._choices = choices
        self._started = time.monotonic()
        self._stream = torch.cuda.Stream(library.device)
        self._num_tried = 0
        self._new: list[str] = []
        """What was chosen and is not remembered yet."""

    def kernels(self, group: Sequence[Tensor], num_rows: Sequence[int]) -> Kernels | None:
        """Return the kernels of weights of one shape; ``None`` where torch's are good enough."""
        weight = group[0]
        if weight.dtype not in DTYPES or weight.nbytes < _MIN_WEIGHT_NBYTES or not num_rows:
            return None
        out_features, in_features = weight.shape
        by_rows: dict[int, Kernel | None] = {}
        try:
            product = Product(self._library, out_features, in_features, weight.dtype)
            for rows in num_rows:
                algo = self._algo(product, group, rows)
                by_rows[rows] = product.kernel(algo) if algo else None
        except _FAILURES as error:
            # Trying is to make it faster, and must not stop what runs without.
            logger.info("products of %s take the kernels of torch: %s", list(weight.shape), error)
        return Kernels(by_rows)

    def _algo(self, product: Product, group: Sequence[Tensor], rows: int) -> bytes:
        out_features, in_features = group[0].shape
        key = f"{rows} x {in_features} x {out_features} {group[0].dtype}"
        known = self._choices[key]
        if known == b"" or (known is not None and _is_valid(product, known, rows)):
            return known
        if not self._num_tried:
            logger.info("trying out which kernels multiply the weights fastest")
        self._num_tried += 1
        algo = self._choices[key] = _Contest(product, group, rows, self._stream).winner()
        self._new.append(key)
        return algo

    def finish(self) -> None:
        """Remember what was chosen, if anything was."""
        if not self._num_tried:
            return
        torch.cuda.empty_cache()
        logger.info(
            "chose kernels of %d products in %.1f s, which %s",
            len(self._new),
            time.monotonic() - self._started,
            "is remembered" if self._choices.write(self._new) else "could not be remembered",
        )


def _is_valid(product: Product, algo: bytes, num_rows: int) -> bool:
    return len(algo) == 64 and product.accepts(algo, num_rows)


class _Contest:
    """Kernels that multiply the same matrices in turn.

    Large products heat the device until its clock falls, and then others win, so that it is worked
    warm first and the best are compared in turns.

    Args:
        product: The shape.
        weights: Of that shape.
        num_rows: Of the other factor.
        stream: To work on.
    """

    def __init__(
        self,
        product: Product,
        weights: Sequence[Tensor],
        num_rows: int,
        stream: torch.cuda.Stream,
    ) -> None:
        weight = weights[0]
        self._product = product
        self._is_recorded = num_rows <= _RECORDED_UP_TO
        self._weights = weights[: _WEIGHTS if self._is_recorded else _WEIGHTS_OF_LARGE]
        self._num_rows = num_rows
        generator = torch.Generator(weight.device).manual_seed(0)
        size = (num_rows, weight.shape[1])
        self._x = torch.randn(size, dtype=weight.dtype, device=weight.device, generator=generator)
        self._out = weight.new_empty((num_rows, weight.shape[0]))
        self._stream = stream

    def winner(self) -> bytes:
        """Return the fastest algorithm, or nothing if torch's own is hardly slower."""
        self._stream.wait_stream(torch.cuda.current_stream(self._x.device))
        with torch.cuda.stream(self._stream):
            algo = self._winner()
            self._stream.synchronize()
        return algo

    def _winner(self) -> bytes:
        own = self._lap(self._multiply)
        own()
        expected = self._sample()
        lasts = self._milliseconds(own, 3) / 3
        block, warm = (8.0, 200.0) if self._num_rows >= _HOT_FROM else (2.0, 50.0)
        count = max(1, round(block / lasts))
        self._milliseconds(own, max(1, round(warm / lasts)))
        laps = {}
        for algo in self._product.offers(self._num_rows):
            kernel = self._product.kernel(algo)
            self._out.fill_(torch.nan)
            # The last weight of a lap is the one whose product stands there.
            if kernel(self._x, self._weights[-1], self._out) and self._agrees(expected):
                laps[algo] = self._lap(partial(self._with, kernel))
        times = {algo: self._milliseconds(lap, count) for algo, lap in laps.items()}
        finalists = sorted(times, key=times.__getitem__)[:_NUM_FINALISTS]
        turns: dict[bytes, list[float]] = {b"": [], **{algo: [] for algo in finalists}}
        order = list(turns)
        for _ in range(_NUM_ROUNDS):
            for algo in order:
                turns[algo].append(self._milliseconds(laps.get(algo, own), count))
            order.reverse()
        lasting = {algo: statistics.median(taken) for algo, taken in turns.items()}
        best = min(lasting, key=lasting.__getitem__)
        logger.debug(
            "%d rows, %s: %.3f of torch's time, %d kernels",
            self._num_rows,
            list(self._weights[0].shape),
            lasting[best] / lasting[b""],
            len(laps),
        )
        return best if lasting[best] < _GAIN * lasting[b""] else b""

    def _multiply(self, weight: Tensor) -> None:
        torch.mm(self._x, weight.t(), out=self._out)

    def _with(self, kernel: Kernel, weight: Tensor) -> None:
        kernel(self._x, weight, self._out)

    def _agrees(self, expected: Tensor) -> bool:
        difference = self._sample() - expected
        return bool(difference.norm() <= _AGREEMENT * expected.norm())

    def _sample(self) -> Tensor:
        """Return the first and the last rows of the product."""
        return torch.cat((self._out[:_NUM_COMPARED], self._out[-_NUM_COMPARED:])).float()

    def _lap(self, multiply: Callable[[Tensor], None]) -> Callable[[], None]:
        """Return what multiplies with every weight, one launch where launching would cost more."""

        def lap() -> None:
            for weight in self._weights:
                multiply(weight)

        if not self._is_recorded:
            return lap
        lap()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        lap()
        graph.capture_end()
        return graph.replay

    def _milliseconds(self, lap: Callable[[], None], count: int) -> float:
        """Return how long so many laps take, behind one that is not counted."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        lap()
        start.record()
        for _ in range(count):
            lap()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
