"""The text of one answer out of its outputs: which ids are text, where it ends, and why."""

from typing import NamedTuple

from mstar.engine.output import FinishReason, RequestOutput
from mstar.preprocess.detokenizer import Detokenizer


class TextDelta(NamedTuple):
    """What one output adds to an answer."""

    text: str
    """As far as it is certain."""
    num_taken: int
    """Ids of the output that belong to the answer: none behind the one that ended its text."""
    num_visible: int
    """Of these, the ids that are text: all but a stop token."""
    finish_reason: FinishReason | None
    """Why the answer is over, if it is."""


class AnswerText:
    """Follows one answer.

    Args:
        detokenizer: Makes its text, and knows the stop strings.
        is_spoken: What is written is spoken too: a stop string ends the text, and the engine, which
            looks for it as well, the answer once all is said.
    """

    def __init__(self, detokenizer: Detokenizer, *, is_spoken: bool = False) -> None:
        self._detokenizer = detokenizer
        self._is_spoken = is_spoken

    @property
    def is_cut(self) -> bool:
        """Whether a stop string has ended the answer, which the engine knows nothing of."""
        return self._detokenizer.stopped and not self._is_spoken

    def push(self, output: RequestOutput) -> TextDelta:
        """Take one output in."""
        detokenizer, ids, reason = self._detokenizer, output.token_ids, output.finish_reason
        num_taken = len(ids)
        num_visible = num_taken - output.has_stop_token
        if detokenizer.stopped:
            num_taken = num_visible = 0
        pieces = []
        for place, token in enumerate(ids[:num_visible], 1):
            pieces.append(detokenizer.push((token,)))
            if detokenizer.stopped:
                num_taken = num_visible = place
                break
        if reason is not None:
            pieces.append(detokenizer.finish())
        if self.is_cut or (detokenizer.stopped and reason == "length"):
            reason = "stop"
        return TextDelta("".join(pieces), num_taken, num_visible, reason)
