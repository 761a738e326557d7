"""Components that are ONNX files: ONNX Runtime on the CPU, as a node that keeps no state."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from mstar.engine.batch import Batch, Node, NodeKind, NodeOutput
from mstar.engine.output import Emitted
from mstar.engine.request import Request
from mstar.errors import UnsupportedError, WeightsError

Feeds = Mapping[str, npt.NDArray[Any]]
"""The inputs of one run, by name."""
Fetched = Mapping[str, npt.NDArray[Any]]
"""The outputs of one run, by name."""

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(bool)": np.bool_,
}


def require(module: str, what: str) -> ModuleType:
    """Import a module of the extra ``speech``.

    Args:
        module: Its full name.
        what: What needs it, as the beginning of a sentence.

    Raises:
        UnsupportedError: If it is not installed; names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = {"piper": "piper-tts"}.get(module.partition(".")[0], module.partition(".")[0])
        raise UnsupportedError(
            f"{what} needs {package}, which is not usable here ({error}); "
            "pip install 'mstar-engine[speech]'"
        ) from error


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    """``None``: any size."""

    def takes(self, array: npt.NDArray[Any]) -> bool:
        """Tell whether an array may be passed here."""
        return (
            array.dtype == self.dtype
            and array.ndim == len(self.shape)
            and all(
                want in (None, size) for want, size in zip(self.shape, array.shape, strict=True)
            )
        )


class OnnxSession:
    """A loaded ONNX graph.

    Args:
        source: The file, or its bytes where they were changed after reading.
        threads: Threads of one run; ``None``: as many as torch takes.
        name: Of the graph, for messages; ``None``: the file's.
        side_by_side: Where several runs are asked for, have two at a time, which takes less time
            than one after the other: one computes while the other waits for its slower thread.

    Raises:
        UnsupportedError: If ONNX Runtime is not installed, or the graph has an input or output
            that is no tensor of numbers.
        WeightsError: If it is no ONNX graph that ONNX Runtime can load.
    """

    def __init__(
        self,
        source: Path | bytes,
        *,
        threads: int | None = None,
        name: str | None = None,
        side_by_side: bool = False,
    ) -> None:
        self.name = name or (str(source) if isinstance(source, Path) else "ONNX graph")
        threads = _torch_threads() if threads is None else threads
        self.num_at_once = 2 if side_by_side and threads > 1 else 1
        """Runs that may go on at the same time."""
        # Operators are cut up by the session's threads, which decides how sums round: runs side by
        # side share a session, so that each gives what it gives alone.
        self._session = self._load(source, threads)
        self._lanes = ThreadPoolExecutor(self.num_at_once, thread_name_prefix=self.name)
        self.inputs = tuple(map(self._port, self._session.get_inputs()))
        self.outputs = tuple(map(self._port, self._session.get_outputs()))

    def _load(self, source: Path | bytes, threads: int) -> Any:
        runtime = require("onnxruntime", "running an ONNX file")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads that wait between operators would take the cores from the other components.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # What fails is raised; it need not be printed as well.
        options.log_severity_level = 4
        if isinstance(source, Path) and not source.is_file():
            raise WeightsError(f"{source}: there is no such file")
        try:
            return runtime.InferenceSession(
                source if isinstance(source, bytes) else str(source),
                options,
                providers=["CPUExecutionProvider"],
            )
        # ONNX Runtime's own exceptions have no other base.
        except Exception as error:
            raise WeightsError(f"{self.name}: no usable ONNX graph: {error!s:.300}") from error

    def _port(self, found: Any) -> Port:
        if found.type not in _DTYPES:
            raise UnsupportedError(
                f"{self.name}: {found.name!r} is a {found.type}; known are {', '.join(_DTYPES)}"
            )
        shape = tuple(size if isinstance(size, int) else None for size in found.shape)
        return Port(found.name, np.dtype(_DTYPES[found.type]), shape)

    def run(self, feeds: Feeds) -> Fetched:
        """Run the graph once.

        Args:
            feeds: An array for each input, of its dtype and shape.

        Returns:
            An array for each output.

        Raises:
            RuntimeError: If the run fails inside ONNX Runtime; says why.
        """
        names = {port.name for port in self.inputs}
        assert names == set(feeds), f"{self.name} takes {sorted(names)}, not {sorted(feeds)}"
        for port in self.inputs:
            given = feeds[port.name]
            assert port.takes(given), (
                f"{self.name}: input {port.name!r} takes {port.dtype} of shape {port.shape}, "
                f"not {given.dtype} of shape {given.shape}"
            )
        try:
            found = self._session.run(None, dict(feeds))
        except Exception as error:
            raise RuntimeError(f"{self.name} failed: {error!s:.300}") from error
        return {port.name: array for port, array in zip(self.outputs, found, strict=True)}

    def run_all(self, many: Sequence[Feeds], stacked: frozenset[str]) -> list[Fetched]:
        """Run the graph for several inputs, those of equal shape in one run.

        Args:
            many: The inputs of each, with a first axis of 1 where they are stacked.
            stacked: Inputs that are joined along their first axis; the others must be equal to
                be joined. Empty: everything runs by itself. Outputs are cut along theirs.

        Returns:
            What each got.

        Raises:
            RuntimeError: If a run fails.
        """
        groups: defaultdict[object, list[int]] = defaultdict(list)
        for place, feeds in enumerate(many):
            groups[_likeness(feeds, stacked) if stacked else place].append(place)
        joined = [_joined([many[place] for place in places], stacked) for places in groups.values()]
        is_shared = self.num_at_once > 1 and len(joined) > 1
        each = self._lanes.map(self.run, joined) if is_shared else map(self.run, joined)
        found: dict[int, Fetched] = {}
        for places, fetched in zip(groups.values(), each, strict=True):
            found |= zip(places, _cut(fetched, len(places)), strict=True)
        return [found[place] for place in range(len(many))]


class OnnxNode(Node):
    """A node that an ONNX graph computes; families say what goes in and what comes out.

    Args:
        session: The loaded graph.
        stacked: As for :meth:`OnnxSession.run_all`.
    """

    kind = NodeKind.VISIT

    def __init__(self, session: OnnxSession, stacked: frozenset[str] = frozenset()) -> None:
        unknown = stacked - {port.name for port in session.inputs}
        assert not unknown, f"{session.name} has no inputs {sorted(unknown)} to stack"
        self.session = session
        self._stacked = stacked

    @abstractmethod
    def feeds(self, request: Request, chunk: object) -> Sequence[Feeds]:
        """Return the inputs of each run that a visit takes; there may be none."""

    @abstractmethod
    def emit(self, request: Request, chunk: object, fetched: Sequence[Fetched]) -> list[Emitted]:
        """Return what a visit yields, given the outputs of its runs."""

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Visit every request of the batch; runs of equal shape are one."""
        visits = list(zip(batch.requests, batch.chunks or (), strict=True))
        feeds = [self.feeds(*visit) for visit in visits]
        fetched = iter(self.session.run_all(list(chain.from_iterable(feeds)), self._stacked))
        emitted = {
            place: self.emit(*visit, list(islice(fetched, len(own))))
            for place, (visit, own) in enumerate(zip(visits, feeds, strict=True))
        }
        return NodeOutput(token_ids=(), emitted=emitted)


def _joined(alike: list[Feeds], stacked: frozenset[str]) -> Feeds:
    """Return the inputs of one run for several."""
    if len(alike) == 1:
        return alike[0]
    return {
        name: np.concatenate([feeds[name] for feeds in alike]) if name in stacked else one
        for name, one in alike[0].items()
    }


def _cut(fetched: Fetched, count: int) -> list[Fetched]:
    """Return what each of the inputs that shared a run got."""
    if count == 1:
        return [fetched]
    return [
        {name: array[place : place + 1] for name, array in fetched.items()}
        for place in range(count)
    ]


def _likeness(feeds: Feeds, stacked: frozenset[str]) -> object:
    """Return what inputs that may share a run have in common."""
    return tuple(
        (name, array.shape, b"" if name in stacked else array.tobytes())
        for name, array in sorted(feeds.items())
    )


def _torch_threads() -> int:
    import torch  # noqa: PLC0415 - a session of given threads needs no torch

    return torch.get_num_threads()
