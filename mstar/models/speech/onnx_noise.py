"""Gives an ONNX graph its noise from outside, so that the same seed gives the same output.

A graph that draws noise has nodes ``RandomNormalLike``, whose draws depend on all runs before.
Each is replaced by nodes that read as many numbers from a new input of the graph::

    like ─► RandomNormalLike ─► y        like ─► Shape, Size ─► indices
                                         noise[k] ─► Gather(indices mod k) ─► Reshape ─► y

Graphs are protocol buffers: a message is a run of fields, each a key (number and wire type) and a
value, and fields that are not understood are copied as they are. Numbers of fields are those of
onnx.proto3.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mstar.errors import WeightsError

_GRAPH, _NODE, _INITIALIZER, _INPUT = 7, 1, 5, 11
_FLOAT, _INT64 = 1, 7
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_ONE = "mstar.one"
_ZERO = "mstar.zero"


class _Field(NamedTuple):
    number: int
    raw: memoryview
    """The whole field, its key included."""
    value: memoryview
    """What it holds, where it holds bytes."""


def with_noise_inputs(model: bytes) -> tuple[bytes, list[str]]:
    """Return an ONNX model whose noise comes from inputs, and their names.

    Args:
        model: The file.

    Returns:
        The model, and for each node that drew standard normal numbers an input ``[k]``, float32, of
        any length: it is read from its beginning, and over again where it is too short.

    Raises:
        WeightsError: If the bytes are no ONNX model.
    """
    names: list[str] = []
    changed: list[bytes | memoryview] = []
    for field in _fields(memoryview(model)):
        changed.append(
            _field(_GRAPH, _rewrite(field.value, names)) if field.number == _GRAPH else field.raw
        )
    return (b"".join(changed), names) if names else (model, names)


def _rewrite(graph: memoryview, names: list[str]) -> bytes:
    parts: list[bytes | memoryview] = []
    for field in _fields(graph):
        drawn = _drawn(field.value) if field.number == _NODE else None
        if drawn is None:
            parts.append(field.raw)
            continue
        like, output = drawn
        name = f"mstar.noise.{len(names)}"
        names.append(name)
        parts += [_field(_NODE, node) for node in _read_noise(name, like, output)]
    if names:
        parts += [_field(_INITIALIZER, _scalar(name, n)) for n, name in enumerate((_ZERO, _ONE))]
        parts += [_field(_INPUT, _vector(name)) for name in names]
    return b"".join(parts)


def _drawn(node: memoryview) -> tuple[str, str] | None:
    """Return input and output of a node that draws standard normal numbers in float32."""
    inputs, outputs, operator = [], [], ""
    for field in _fields(node):
        if field.number == 1:
            inputs.append(str(field.value, "utf-8"))
        elif field.number == 2:
            outputs.append(str(field.value, "utf-8"))
        elif field.number == 4:
            operator = str(field.value, "utf-8")
        elif field.number == 5 and not _is_plain(field.value):
            return None
    if operator != "RandomNormalLike":
        return None
    return inputs[0], outputs[0]


def _is_plain(attribute: memoryview) -> bool:
    """Tell whether an attribute leaves the numbers standard normal in float32."""
    held = {field.number: field for field in _fields(attribute)}
    name = str(held[1].value, "utf-8")
    if name == "dtype":
        return 3 in held and held[3].raw[-1] == _FLOAT
    return name == "seed"


def _read_noise(name: str, like: str, output: str) -> Iterator[bytes]:
    shape, size, places, length, wrapped, flat = (
        f"{name}.{part}" for part in ("shape", "size", "places", "length", "wrapped", "flat")
    )
    yield _node("Shape", [like], shape)
    yield _node("Size", [like], size)
    yield _node("Range", [_ZERO, size, _ONE], places)
    yield _node("Size", [name], length)
    yield _node("Mod", [places, length], wrapped)
    yield _node("Gather", [name, wrapped], flat)
    yield _node("Reshape", [flat, shape], output)


def _node(operator: str, inputs: list[str], output: str) -> bytes:
    return b"".join(
        [
            *(_field(1, name.encode()) for name in inputs),
            _field(2, output.encode()),
            _field(3, f"{output}.{operator}".encode()),
            _field(4, operator.encode()),
        ]
    )


def _scalar(name: str, value: int) -> bytes:
    """Return a tensor without axes: an int64."""
    return _number(2, _INT64) + _field(8, name.encode()) + _field(9, value.to_bytes(8, "little"))


def _vector(name: str) -> bytes:
    """Return the declaration of a float32 vector of any length."""
    shape = _field(1, _field(2, f"{name}.k".encode()))
    tensor = _number(1, _FLOAT) + _field(2, shape)
    return _field(1, name.encode()) + _field(2, _field(1, tensor))


# The wire format


def _fields(message: memoryview) -> Iterator[_Field]:
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        value = message[:0]
        wire = key & 7
        if wire == _VARINT:
            _, at = _varint(message, at)
        elif wire == _BYTES:
            length, at = _varint(message, at)
            value = message[at : at + length]
            at += length
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise WeightsError(f"no ONNX model: wire type {wire} at byte {start}")
        if at > len(message):
            raise WeightsError(f"no ONNX model: it ends within the field at byte {start}")
        yield _Field(key >> 3, message[start:at], value)


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise WeightsError("no ONNX model: it ends within a number")


def _encoded(value: int) -> bytes:
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _field(number: int, value: bytes) -> bytes:
    return _encoded(number << 3 | _BYTES) + _encoded(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _encoded(number << 3 | _VARINT) + _encoded(value)
