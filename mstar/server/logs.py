"""How mstar's processes log: one format, on standard error."""

import logging
import sys

LOG_LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    """Send the records of mstar, and warnings of everybody else, to standard error.

    Args:
        level: One of ``LOG_LEVELS``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("mstar").setLevel(level.upper())
