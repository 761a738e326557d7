"""How the threads of a process that computes wait for each other; loads nothing."""

from collections.abc import MutableMapping


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Let threads that wait soon leave their cores, unless the user has set it otherwise.

    With libgomp's default of milliseconds, one busy neighbour makes a decode step many times as
    long. It is read when torch is loaded.

    Args:
        environment: Of the process; gets ``GOMP_SPINCOUNT``.
    """
    environment.setdefault("GOMP_SPINCOUNT", "3000")
