"""What a container of sound and films is by its first bytes, and how long it says to be."""

_FIRST_BOXES = frozenset({b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide"})
"""What an MP4 begins with; QuickTime's need not name their kind."""
_BOXES = _FIRST_BOXES | {
    b"uuid",
    b"sidx",
    b"ssix",
    b"mfra",
    b"meta",
    b"prft",
    b"emsg",
    b"pdin",
    b"udta",
}
"""What an MP4 is made of; what else stands behind it, a tag or a page, is none of it."""
_PICTURES = frozenset({b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1"})
"""Kinds of MP4 that are pictures."""
_BOX_HEAD = 8
_MAX_BOXES = 1 << 20
_EBML_HEAD, _SEGMENT, _VOID, _CRC = 0x1A45DFA3, 0x18538067, 0xEC, 0xBF
"""Elements of a Matroska."""
_MAX_ELEMENTS = 64


def container_of(data: bytes) -> str | None:
    """Return which container a file is, by its first bytes; ``None``: none of these.

    >>> container_of(b"....ftypM4A "), container_of(b"RIFF....WAVE")
    ('MP4', None)
    """
    if data[4:8] in _FIRST_BOXES and data[8:12] not in _PICTURES:
        return "MP4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "WebM"
    head = _behind_tags(data)
    # Twelve ones, and a layer that MPEG audio has not.
    is_adts = len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0
    return "AAC" if is_adts else None


def _behind_tags(data: bytes) -> bytes:
    """Return the two bytes behind what an ID3 tag says of a recording."""
    if data[:3] != b"ID3" or len(data) < 10:
        return data[:2]
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    # A footer is as long as the header.
    at = 10 + size + (10 if data[5] & 0x10 else 0)
    return data[at : at + 2]


def size_of(data: bytes, container: str) -> int:
    """Return how many bytes a file says to have, more than there are where it is cut off.

    Args:
        data: What is there of it.
        container: As ``container_of`` tells. What is streamed says nothing, and is as long as it
            is.
    """
    return {"MP4": _size_of_boxes, "WebM": _size_of_segment}.get(container, len)(data)


def _size_of_boxes(data: bytes) -> int:
    """Return where the last of an MP4's boxes ends that begins in ``data``."""
    at = 0
    for _ in range(_MAX_BOXES):
        size, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + _BOX_HEAD]
        least = _BOX_HEAD
        if size == 1:
            least = 2 * _BOX_HEAD
            size = int.from_bytes(data[at + _BOX_HEAD : at + least], "big")
        # No size is all that is there.
        if size < least or name not in _BOXES:
            break
        at += size
    return at


def _size_of_segment(data: bytes) -> int:
    """Return where a Matroska's last segment ends; one that was streamed does not say."""
    at = end = 0
    for _ in range(_MAX_ELEMENTS):
        name, at = _ebml_number(data, at, keeps_marker=True)
        size, at = _ebml_number(data, at, keeps_marker=False)
        if size is None or name not in (_EBML_HEAD, _SEGMENT, _VOID, _CRC):
            break
        at += size
        if name == _SEGMENT:
            end = at
    return end


def _ebml_number(data: bytes, at: int, *, keeps_marker: bool) -> tuple[int | None, int]:
    """Return a number and what is behind it; ``None``: it is unknown, or there is none.

    As many zeros as its first byte begins with, so many more bytes it has.
    """
    num_bytes = 9 - data[at].bit_length() if at < len(data) else 9
    content = data[at : at + num_bytes]
    if num_bytes > 8 or len(content) < num_bytes:
        return None, len(data)
    number = int.from_bytes(content, "big")
    mask = (1 << 7 * num_bytes) - 1
    if keeps_marker:
        return number, at + num_bytes
    return (None if number & mask == mask else number & mask), at + num_bytes
