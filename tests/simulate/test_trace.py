import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mstar.errors import MstarError, TraceError
from mstar.simulate.trace import BLOCK_LEN, MAX_LEN, TracedRequest, read_trace

GOOD: dict[str, Any] = {
    "timestamp": 27_000,
    "input_length": 600,
    "output_length": 52,
    "hash_ids": [46, 47],
}


def line(**changes: Any) -> str:
    return json.dumps({k: v for k, v in {**GOOD, **changes}.items() if v is not None})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def test_requests_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, line(), "", line(timestamp=0.5, input_length=1, hash_ids=[9]))
    assert read_trace(path) == [
        TracedRequest(timestamp=27_000, input_length=600, output_length=52, hash_ids=(46, 47)),
        TracedRequest(timestamp=0.5, input_length=1, output_length=52, hash_ids=(9,)),
    ]


def test_a_compressed_trace_is_the_same_trace(tmp_path: Path) -> None:
    plain = write(tmp_path, line(), line())
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, line(chat_id=7)))) == 1


def test_a_limit_leaves_the_rest_unread(tmp_path: Path) -> None:
    path = write(tmp_path, line(), line(), "rubbish")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(TraceError):
        read_trace(path, limit=3)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (line()[:-20], ""),
        ("[]", ""),
        ("7", ""),
        (line(timestamp=None), "`timestamp`"),
        (line(input_length=None), "`input_length`"),
        (line(output_length=None), "`output_length`"),
        (line(hash_ids=None), "`hash_ids`"),
        (line(timestamp=-1), "timestamp"),
        (line(input_length=-600), "input_length"),
        (line(input_length=0, hash_ids=[]), "input_length"),
        (line(input_length=600.5), "input_length"),
        (line(input_length="600"), "input_length"),
        (line(output_length=-1), "output_length"),
        (line(output_length=MAX_LEN + 1), "output_length"),
        (line(output_length=1 << 70), "output_length"),
        (line(hash_ids=[46, -1]), "hash_ids"),
        (line(hash_ids=[46, True]), "hash_ids"),
        (line(hash_ids="46"), "hash_ids"),
        (line(hash_ids=[46]), "`hash_ids` has 1 blocks"),
        (line(hash_ids=[46, 47, 48]), "`hash_ids` has 3 blocks"),
        (line(input_length=2 * BLOCK_LEN + 1), "needs 3"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, text: str, field: str) -> None:
    path = write(tmp_path, line(), "", text, line())
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert field in str(caught.value)
    assert isinstance(caught.value, MstarError)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line().encode() + b"\n\xff\xfe{\x00\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: "):
        read_trace(path)


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.99])
def test_a_truncated_archive_is_named_with_the_line_reached(tmp_path: Path, kept: float) -> None:
    lines = [line(timestamp=number, hash_ids=[number, number**3]) for number in range(500)]
    data = gzip.compress("\n".join(lines).encode())
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz:\d+: "):
        read_trace(path)


@pytest.mark.parametrize("position", [0, 40])
def test_a_damaged_archive_is_an_error(tmp_path: Path, position: int) -> None:
    data = bytearray(gzip.compress(line().encode()))
    data[position] ^= 0xFF
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(bytes(data))
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz:1: "):
        read_trace(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.jsonl.gz", ""):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(tmp_path / name)


def test_a_trace_without_requests_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no request"):
        read_trace(write(tmp_path, "", ""))
