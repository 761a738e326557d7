"""Backs the weights with huge pages, so that reading them misses the TLB less often."""

import ctypes
import logging
import re
import sys
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_COLLAPSE = 25
"""``MADV_COLLAPSE``: replace what is mapped by huge pages, at once. Source: madvise(2)."""
_HUGE = 2 << 20
_MIN_NBYTES = 4 << 20
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0\s*(\[heap\])?$")


def use_huge_pages() -> int:
    """Ask the kernel to put large private memory of this process on huge pages.

    For use once weights are loaded and before memory is reserved that may never be touched. Where
    the kernel cannot or will not, everything stays as it is.

    Returns:
        Bytes that lie on huge pages now.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    for start, end in _large_mappings():
        if madvise(start, end - start, _COLLAPSE) == 0:
            done += end - start
    logger.debug("%d MB of memory lie on huge pages", done >> 20)
    return done


def _large_mappings() -> Iterator[tuple[int, int]]:
    """Yield the aligned inside of every large anonymous mapping."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        lines = maps.read().splitlines()
    for line in lines:
        found = _ANONYMOUS.match(line)
        if found is None:
            continue
        start, end = int(found[1], 16), int(found[2], 16)
        if end - start < _MIN_NBYTES:
            continue
        start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if start < end:
            yield start, end
