"""Token ids to text, as they come: never half a character, never part of a stop string."""

import codecs
from collections.abc import Iterable, Sequence

from mstar.preprocess.pieces import Joining
from mstar.preprocess.tokenizer import TextTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Tokens decoded again with the new ones, where only the tokenizer knows how they join."""
_MAX_OPEN = 16
"""Tokens that may wait for the rest of a character; more than any character has bytes."""


class Detokenizer:
    """The text of one output, piece by piece.

    All pieces together are what decoding all ids at once gives, cut before the first stop string.
    Only an incomplete character at the very end differs: it becomes one U+FFFD.

    Args:
        tokenizer: Whose ids these are.
        stop: Strings that end the text. The one that is complete first counts, of several the
            longest.
        skip_special_tokens: Leave control tokens out of the text.
        stop_after: Ids at the beginning in whose text no stop string is looked for.
        include_stop: The stop string stays part of the text.
        after_text: The output goes on from other text, so a space at its beginning belongs to it.
    """

    stop_string: str | None = None
    """The stop string that ended the text, once it is found."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop: Sequence[str] = (),
        *,
        stop_after: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        after_text: bool = False,
    ) -> None:
        self._decoder = _new_decoder(tokenizer, skip_special_tokens, after_text)
        self._stop = tuple(sorted(stop, key=len, reverse=True))
        self._stop_after = stop_after
        self._include_stop = include_stop
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_string is not None

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that may go out now; empty once a stop string was found."""
        if self.stopped:
            return ""
        if not self._stop:
            return self._decoder.push(token_ids)
        ids = list(token_ids)
        free, ids = ids[: self._stop_after], ids[self._stop_after :]
        self._stop_after -= len(free)
        text = self._decoder.push(free) if free else ""
        return text + self._release(self._decoder.push(ids)) if ids else text

    def finish(self) -> str:
        """Return what was held back, when no more ids will come."""
        if self.stopped:
            return ""
        text = self._decoder.finish()
        if self._stop:
            # A stop string may be complete only now; nothing can complete the rest any more.
            text = self._release(text)
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        """Return the held text and ``text``, up to where a stop string is or may begin."""
        num_held = len(self._held)
        text = self._held + text
        end = len(text) + 1
        for stop in self._stop:
            # Nothing before the new text can complete a stop string.
            at = text.find(stop, max(0, num_held - len(stop) + 1), end - 1)
            # Longest first and strictly earlier, so of two that end together the longest stays.
            if at >= 0 and at + len(stop) < end:
                end, self.stop_string = at + len(stop), stop
        if self.stop_string is not None:
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stop_string)]
        hold = min(_begins(text, stop) for stop in self._stop)
        self._held = text[hold:]
        return text[:hold]


def _begins(text: str, stop: str) -> int:
    """Return where the end of ``text`` may be the beginning of ``stop``; its length if nowhere."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)


class _ByteLevel:
    """Every token is bytes; UTF-8 over all of them."""

    def __init__(self, tokenizer: TextTokenizer, skip: frozenset[int]) -> None:
        self._pieces = tokenizer.pieces
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        pieces, skip = self._pieces, self._skip
        return self._utf8.decode(b"".join([pieces[t][0] for t in token_ids if t not in skip]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallback:
    """Tokens are text, but for runs of single bytes that are text only if all of a run is valid.

    A run is held back until it ends, since the tokenizer's verdict falls on the whole of it.
    """

    def __init__(self, tokenizer: TextTokenizer, skip: frozenset[int], num_stripped: int) -> None:
        self._pieces = tokenizer.pieces
        self._skip = skip
        self._num_stripped = num_stripped
        self._run = bytearray()

    def push(self, token_ids: Iterable[int]) -> str:
        found = []
        for token in token_ids:
            if token in self._skip:
                continue
            data, is_byte = self._pieces[token]
            if is_byte:
                self._run += data
            elif data:
                if self._run:
                    found.append(self._end_run())
                found.append(data.decode())
        text = "".join(found)
        return self._strip(text) if self._num_stripped and text else text

    def finish(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError as error:
            is_cut = error.reason == "unexpected end of data"
            text = self._run[: error.start].decode() + _REPLACEMENT if is_cut else self._end_run()
        self._run.clear()
        return self._strip(text)

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        while self._num_stripped and text:
            if text[0] != " ":
                self._num_stripped = 0
                break
            text = text[1:]
            self._num_stripped -= 1
        return text


class _Window:
    """Decodes a few tokens of context with the new ones and takes what is new."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._num_context = 0

    def push(self, token_ids: Iterable[int]) -> str:
        self._ids += token_ids
        before, after = self._decode(self._ids[: self._num_context]), self._decode(self._ids)
        is_open = after.endswith(_REPLACEMENT) or not after.startswith(before)
        if is_open and len(self._ids) - self._num_context < _MAX_OPEN:
            return ""
        del self._ids[: max(0, len(self._ids) - _CONTEXT)]
        self._num_context = len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._decode(self._ids[: self._num_context]), self._decode(self._ids)
        return after[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _new_decoder(
    tokenizer: TextTokenizer, skip_special_tokens: bool, after_text: bool
) -> _ByteLevel | _ByteFallback | _Window:
    pieces = tokenizer.pieces
    skip = pieces.special_ids if skip_special_tokens else frozenset()
    if pieces.joining is Joining.BYTE_LEVEL:
        return _ByteLevel(tokenizer, skip)
    if pieces.joining is Joining.BYTE_FALLBACK:
        return _ByteFallback(tokenizer, skip, 0 if after_text else pieces.num_stripped)
    return _Window(tokenizer, skip_special_tokens)
