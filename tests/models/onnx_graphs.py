"""Small ONNX graphs, written byte by byte: the package that writes them is not needed otherwise."""

from collections.abc import Sequence

FLOAT, INT64 = 1, 7


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def number(key: int, value: int) -> bytes:
    return varint(key << 3) + varint(value)


def field(key: int, value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return varint(key << 3 | 2) + varint(len(value)) + value


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], *attributes: bytes) -> bytes:
    return b"".join(
        [
            *(field(1, name) for name in inputs),
            *(field(2, name) for name in outputs),
            field(4, operator),
            *(field(5, attribute) for attribute in attributes),
        ]
    )


def integer(name: str, value: int) -> bytes:
    """An attribute."""
    return field(1, name) + number(3, value) + number(20, 2)


def tensor(name: str, dtype: int, shape: Sequence[int | str]) -> bytes:
    """An input or output."""
    dims = b"".join(
        field(1, field(2, size) if isinstance(size, str) else number(1, size)) for size in shape
    )
    return field(1, name) + field(2, field(1, number(1, dtype) + field(2, dims)))


def model(nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes]) -> bytes:
    graph = b"".join(
        [
            *(field(1, one) for one in nodes),
            field(2, "small"),
            *(field(11, one) for one in inputs),
            *(field(12, one) for one in outputs),
        ]
    )
    return number(1, 8) + field(7, graph) + field(8, number(2, 15))


def noisy() -> bytes:
    """``y = x + noise``, and ``z`` with other noise; ``x`` is float32 ``[batch, n]``."""
    return model(
        [
            node("RandomNormalLike", ["x"], ["a"], integer("dtype", FLOAT)),
            node("RandomNormalLike", ["x"], ["b"]),
            node("Add", ["x", "a"], ["y"]),
            node("Add", ["x", "b"], ["z"]),
        ],
        [tensor("x", FLOAT, ["batch", "n"])],
        [tensor("y", FLOAT, ["batch", "n"]), tensor("z", FLOAT, ["batch", "n"])],
    )


def scaled() -> bytes:
    """``y = x * factor``; ``x`` is float32 ``[batch, n]``, ``factor`` float32 ``[1]``."""
    return model(
        [node("Mul", ["x", "factor"], ["y"])],
        [tensor("x", FLOAT, ["batch", "n"]), tensor("factor", FLOAT, [1])],
        [tensor("y", FLOAT, ["batch", "n"])],
    )
