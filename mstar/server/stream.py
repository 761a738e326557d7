"""From engine outputs to the JSON of chats and completions: text, sound, usage and chunks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mstar.engine.output import FinishReason, RequestOutput
from mstar.engine.resources.sampler.config import TokenLogprobs
from mstar.preprocess.answer_text import AnswerText
from mstar.preprocess.detokenizer import Detokenizer
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.rendering import DONE, EVENT_STREAM, Counts, Rendering, event
from mstar.server.spoken import SpokenPart
from mstar.transport.messages import AnswerOptions

_LOWEST_LOGPROB = -9999.0

Json = dict[str, Any]


def item_counts(options: AnswerOptions) -> dict[str, int]:
    """Return the prompts' tokens that are media, as clients name them; none are left out."""
    kinds = dict.fromkeys(kind for counts in options.num_item_tokens for kind in counts)
    return {
        f"{kind}_tokens": sum(counts.get(kind, 0) for counts in options.num_item_tokens)
        for kind in kinds
    }


def _finite(logprob: float) -> float:
    """Return a number that JSON can hold: a masked token's -inf is cut off."""
    return logprob if logprob >= _LOWEST_LOGPROB else _LOWEST_LOGPROB


@dataclass(slots=True)
class Delta:
    """What one output added to a choice."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    spoken: Json
    """What it adds beside text: fields of a message."""


class Choice:
    """One choice of an answer, as it grows.

    Args:
        tokenizer: Of the model.
        options: How the answer is to be shaped.
    """

    def __init__(self, tokenizer: TextTokenizer, options: AnswerOptions) -> None:
        detokenizer = Detokenizer(
            tokenizer,
            options.stop,
            stop_after=options.stop_after,
            skip_special_tokens=options.skip_special_tokens,
            include_stop=options.include_stop,
        )
        self._answer = AnswerText(detokenizer, is_spoken=options.media is not None)
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.num_prompt_tokens = 0
        """Of the prompt that is answered, which the engine may have written itself."""
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.spoken = SpokenPart("wav" if options.media is None else options.media.format)

    @property
    def is_cut(self) -> bool:
        """Whether a stop string has ended it, which the engine knows nothing of."""
        return self._answer.is_cut

    def push(self, output: RequestOutput) -> Delta:
        """Take one output in and return what it adds."""
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens
        text, num_taken, num_visible, reason = self._answer.push(output)
        self.num_tokens += num_taken
        self.finish_reason = reason
        return Delta(
            text,
            output.token_ids[:num_taken],
            [] if output.logprobs is None else output.logprobs[:num_visible],
            reason,
            self.spoken.take(output.emitted) if output.emitted else {},
        )

    def keep(self, delta: Delta) -> None:
        """Add a delta to what the whole answer will hold."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs


class Answer(Rendering):
    """The JSON of one HTTP request's answer, whole or in chunks.

    Args:
        answer_id: Its ``id``.
        options: How it is to be shaped.
        tokenizer: Of the model.
        fingerprint: Its ``system_fingerprint``.
    """

    def __init__(
        self, answer_id: str, options: AnswerOptions, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._is_chat = options.route == "chat"
        self.content_type = EVENT_STREAM if options.stream else "application/json"
        self.is_heavy = options.media is not None
        num_choices = options.num_choices * len(options.num_prompt_tokens)
        self.choices = [Choice(tokenizer, options) for _ in range(num_choices)]
        self.num_open = num_choices
        kind = "chat.completion" if self._is_chat else "text_completion"
        if self._is_chat and options.stream:
            kind = "chat.completion.chunk"
        self._head: Json = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": options.model,
            "system_fingerprint": fingerprint,
        }
        self._text_offsets = [0] * num_choices

    def push(self, index: int, output: RequestOutput) -> Delta:
        """Take in an output of choice ``index``."""
        choice = self.choices[index]
        delta = choice.push(output)
        if delta.finish_reason is not None:
            self.num_open -= 1
        return delta

    def take(self, index: int, output: RequestOutput) -> bytes:
        """Take in an output of choice ``index``; returns the events that carry it."""
        delta = self.push(index, output)
        if self._options.stream:
            return self.chunk(index, delta)
        self.choices[index].keep(delta)
        return b""

    def is_open(self, index: int) -> bool:
        """Tell whether choice ``index`` goes on."""
        return self.choices[index].finish_reason is None

    def is_cut(self, index: int) -> bool:
        """Tell whether choice ``index`` ended at a stop string."""
        return self.choices[index].is_cut

    def finish_reasons(self) -> Sequence[FinishReason | None]:
        """Return why each choice has ended."""
        return [choice.finish_reason for choice in self.choices]

    def counts(self) -> Counts:
        """Return the tokens so far."""
        first = self.choices[:: self._options.num_choices]
        num_prompt = sum(self._options.num_prompt_tokens)
        if self._options.num_context_tokens:
            # What was heard comes first; the prompt with the words in it is known afterwards.
            num_prompt = first[0].num_prompt_tokens + self._options.num_context_tokens
        return Counts(
            num_prompt=num_prompt,
            num_cached=sum(choice.num_cached_tokens for choice in first),
            num_completion=sum(choice.num_tokens for choice in self.choices),
        )

    def usage(self) -> Json:
        """Return the tokens so far, as clients read them."""
        counts = self.counts()
        return {
            "prompt_tokens": counts.num_prompt,
            "completion_tokens": counts.num_completion,
            "total_tokens": counts.num_prompt + counts.num_completion,
            "prompt_tokens_details": {
                "cached_tokens": counts.num_cached,
                **item_counts(self._options),
            },
        }

    def whole(self) -> bytes:
        """Return the body of an answer that is not streamed."""
        choices = []
        for index, choice in enumerate(self.choices):
            delta = Delta(choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, {})
            item = self._choice(index, delta)
            if self._is_chat:
                item["message"] = {"role": "assistant", "content": choice.text}
                item["message"] |= choice.spoken.whole(choice.text)
            choices.append(item)
        body: Json = {**self._head, "choices": choices, "usage": self.usage()}
        if self._options.prompt_token_ids is not None and self._is_chat:
            body["prompt_token_ids"] = self._options.prompt_token_ids[0]
        return msgspec.json.encode(body)

    def opening(self) -> bytes:
        """Return the events that a stream begins with."""
        if not self._is_chat:
            return b""
        chunks = []
        for index in range(len(self.choices)):
            item: Json = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            extra: Json = {}
            if index == 0 and self._options.prompt_token_ids is not None:
                extra["prompt_token_ids"] = self._options.prompt_token_ids[0]
            chunks.append(self._chunk([item], extra))
        return b"".join(chunks)

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Return the event that carries ``delta``; none where it would say nothing."""
        silent = not (delta.text or delta.logprobs or delta.spoken) and delta.finish_reason is None
        if silent and not self._options.return_token_ids:
            return b""
        item = self._choice(index, delta)
        if self._is_chat:
            item["delta"] = ({"content": delta.text} if delta.text else {}) | delta.spoken
        return self._chunk([item], {})

    def closing(self) -> bytes:
        """Return the events that a stream ends with."""
        if not self._options.include_usage:
            return DONE
        usage: Json = {**self._head, "choices": [], "usage": self.usage()}
        return event(msgspec.json.encode(usage)) + DONE

    def _chunk(self, choices: list[Json], extra: Json) -> bytes:
        body: Json = {**self._head, "choices": choices, **extra}
        if self._options.continuous_usage:
            body["usage"] = self.usage()
        elif self._options.include_usage:
            body["usage"] = None
        return event(msgspec.json.encode(body))

    def _choice(self, index: int, delta: Delta) -> Json:
        item: Json = {"index": index}
        wants_logprobs = self._options.num_top_logprobs is not None
        if self._is_chat:
            item["logprobs"] = (
                {"content": [self._chat_logprob(entry) for entry in delta.logprobs]}
                if wants_logprobs
                else None
            )
        else:
            item["text"] = delta.text
            item["logprobs"] = (
                self._completion_logprobs(index, delta.logprobs) if wants_logprobs else None
            )
        item["finish_reason"] = delta.finish_reason
        if self._options.return_token_ids:
            item["token_ids"] = delta.token_ids
            if not self._is_chat and self._options.prompt_token_ids is not None:
                prompt = index // self._options.num_choices
                item["prompt_token_ids"] = self._options.prompt_token_ids[prompt]
        return item

    def _chat_logprob(self, entry: TokenLogprobs) -> Json:
        num_top = self._options.num_top_logprobs or 0
        return {
            **self._token_json(entry.token_id, entry.logprob),
            "top_logprobs": [self._token_json(*pair) for pair in entry.top[:num_top]],
        }

    def _token_json(self, token: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _completion_logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> Json:
        num_top = self._options.num_top_logprobs or 0
        texts = [self._tokenizer.token_text(entry.token_id) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._text_offsets[index])
            self._text_offsets[index] += len(text)
        tops: list[dict[str, float]] = []
        for text, entry in zip(texts, entries, strict=True):
            top = {
                self._tokenizer.token_text(token): _finite(value)
                for token, value in reversed(entry.top[:num_top])
            }
            # The chosen token is always among them, as clients expect.
            tops.append(top | {text: _finite(entry.logprob)})
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": tops if num_top else None,
            "text_offset": offsets,
        }
