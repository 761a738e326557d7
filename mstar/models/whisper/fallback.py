"""When a window is written down again, at a higher temperature, or says nothing.

A decoder that has lost the thread repeats itself or is unsure of every word; chance gets it out. In
silence it writes what is often said.

Source: Radford et al. 2022, arXiv:2212.04356, section 4.5, whose thresholds these are.
"""

from collections.abc import Mapping

_MAX_COMPRESSION = 2.4
_MIN_LOGPROB = -1.0
_MIN_NO_SPEECH = 0.6
_NUM_ATTEMPTS = 6
SURE = 0.5
"""Temperature from which on a window is no example for the next one."""


def temperature_of(attempt: int) -> float:
    """Return what the first, second, ... attempt at a window is sampled with.

    >>> [temperature_of(attempt) for attempt in range(3)]
    [0.0, 0.2, 0.4]
    """
    return attempt / (_NUM_ATTEMPTS - 1)


def is_silent(told: Mapping[str, float]) -> bool:
    """Tell whether nothing is said in a window.

    Args:
        told: Its figures, as ``Facts`` tells them.
    """
    is_unsure = told["avg_logprob"] < _MIN_LOGPROB
    return is_unsure and told.get("no_speech_prob", 0.0) > _MIN_NO_SPEECH


def is_worth_another(attempt: int, told: Mapping[str, float]) -> bool:
    """Tell whether a window that is not silent is written down once more.

    Args:
        attempt: Which this was, from 0.
        told: Its figures.
    """
    is_unsure = told["avg_logprob"] < _MIN_LOGPROB
    repeats_itself = told["compression_ratio"] > _MAX_COMPRESSION
    return attempt + 1 < _NUM_ATTEMPTS and (is_unsure or repeats_itself)
