"""Ids and keys of streams, against their description and the byte-by-byte oracle of keys."""

import struct
from hashlib import sha256

import pytest

from mstar.simulate.outcome import Reading, Setup
from mstar.simulate.streams import ROOT, Streams
from mstar.simulate.trace import TracedRequest
from tests.oracles import keys as oracle

REQUEST = TracedRequest(timestamp=0, input_length=600, output_length=21, hash_ids=(3, 70))


def ids_of(name: str, length: int) -> list[int]:
    eight = struct.unpack("<8I", sha256(name.encode()).digest())
    return [eight[i % 8] for i in range(length)]


def test_ids_follow_from_the_names_of_blocks() -> None:
    stream = Streams(Setup(page_size=256), Reading.AS_SERVED).stream(5, REQUEST)
    expected = ids_of("block 3", 512) + ids_of("block 70", 88)
    assert [stream.ids[i] for i in range(len(stream.ids))] == expected
    assert stream.opening.max_len == 600
    assert stream.limit == 599
    assert stream.num_generated == 0


def test_by_the_prefix_rule_the_last_page_is_filled_up() -> None:
    stream = Streams(Setup(page_size=256), Reading.PREFIX_RULE).stream(5, REQUEST)
    expected = ids_of("block 3", 512) + ids_of("block 70", 256)
    assert [stream.ids[i] for i in range(len(stream.ids))] == expected
    assert stream.limit == stream.opening.max_len == 768


@pytest.mark.parametrize("reading", Reading)
@pytest.mark.parametrize("page_size", [64, 512])
def test_keys_are_those_of_the_full_pages(reading: Reading, page_size: int) -> None:
    streams = Streams(Setup(page_size=page_size), reading)
    stream = streams.stream(5, REQUEST)
    ids = [stream.ids[i] for i in range(len(stream.ids))]
    num_full = len(ids) // page_size
    pages = [ids[i * page_size : (i + 1) * page_size] for i in range(num_full)]
    assert stream.opening.page_keys == oracle.chain(
        pages, {}, oracle.fingerprint("mstar-simulate-v1")
    )
    assert stream.opening.root == ROOT


def test_generated_ids_stand_behind_the_prompt_once_they_are_known() -> None:
    streams = Streams(Setup(outputs=True), Reading.AS_SERVED)
    stream, other = streams.stream(5, REQUEST), streams.stream(6, REQUEST)
    assert stream.opening.max_len == 621
    assert stream.num_generated == 20
    assert len(stream.ids) == 600
    assert len(stream.ids[590:630]) == 10
    stream.ids.length += stream.num_generated
    assert list(stream.ids[600:700]) == ids_of("generated 5", 20)
    other.ids.length += 20
    assert not set(other.ids[600:620]) & set(stream.ids[600:620])
