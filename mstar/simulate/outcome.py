"""What a replay is asked for and what it counted; values only."""

from dataclasses import dataclass
from enum import Enum

from mstar.errors import ConfigError
from mstar.simulate.trace import BLOCK_LEN


class Reading(Enum):
    """What counts as reused."""

    PREFIX_RULE = "prefix rule"
    """Pages; the unfinished last one counts as one, and all of them may be reused."""
    AS_SERVED = "as served"
    """Tokens of full pages, where at least one token of a prompt is always computed."""

    @property
    def unit(self) -> str:
        """What hits are counted in."""
        return "pages" if self is Reading.PREFIX_RULE else "tokens"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The cache and the load of one replay.

    Raises:
        ConfigError: If pages do not divide the trace's blocks, or a number is not positive.
    """

    page_size: int = BLOCK_LEN
    """Slots of a page, in tokens; a divisor of the trace's blocks."""
    num_pages: int | None = None
    """Pages of the pool; ``None``: more than the trace could ever fill."""
    concurrency: int = 1
    """Requests that are open at once; before one more opens, the oldest ends."""
    outputs: bool = False
    """Store what was generated too; its ids are each request's own."""

    def __post_init__(self) -> None:
        if self.page_size < 1 or BLOCK_LEN % self.page_size:
            raise ConfigError(
                f"the page size is {self.page_size} tokens; a trace tells blocks of {BLOCK_LEN} "
                f"tokens apart, so it must divide {BLOCK_LEN}"
            )
        if self.num_pages is not None and self.num_pages < 1:
            raise ConfigError(f"the pool has {self.num_pages} pages; it needs at least 1")
        if self.concurrency < 1:
            raise ConfigError(f"{self.concurrency} requests are open at once; it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one replay counted."""

    setup: Setup
    reading: Reading
    num_requests: int
    """Requests of the trace, the refused ones included."""
    num_refused: int
    """Requests that could never fit the pool."""
    num_waits: int
    """Requests that found a place, but no room until an older one had ended."""
    num_preempted: int
    """Times that a request had to start again so that an older one could end."""
    num_hits: int
    """What requests reused when they first started, in the reading's unit."""
    num_possible: int
    """All prompts in the reading's unit, those of refused requests included."""
    num_evictions: int
    """Pages whose content was given up for another."""
    seconds: float
    """Wall time of the replay."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompts that was reused."""
        return self.num_hits / self.num_possible
