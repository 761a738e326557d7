"""What a client of a server can see of its prefix cache: cached tokens and times."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from mstar.cli.client import Client, Event, ServerError

Route = Literal["chat", "completion"]
_T = TypeVar("_T")
Content = str | list[dict[str, Any]]
"""A prompt: a text, or the parts of a message."""
_PATHS: Mapping[Route, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "side", "kind", "head"),
)
_NUM_SAMPLE = 48
_SIDE = 1600
"""Of pictures, in pixels: decoding one takes a time that can be seen."""
_DEFAULT_MAX_LEN, _DEFAULT_PAGE_SIZE = 2048, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """One way of asking."""

    route: Route
    is_streamed: bool

    def __str__(self) -> str:
        return f"{self.route}{', streamed' if self.is_streamed else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came back."""

    num_prompt_tokens: int
    num_cached_tokens: int | None
    """``None``: the server does not say."""
    seconds: float
    """Streams: until the first token. Others: 0."""


class Probe:
    """Asks one server for one token at a time.

    Args:
        client: Of the server.
        model: Name that requests use; ``None``: the first that the server lists.
        rng: Makes prompts and salts that were not used before.

    Raises:
        ServerError: If the server does not answer.
    """

    def __init__(self, client: Client, model: str | None, rng: random.Random) -> None:
        self._client = client
        self._rng = rng
        listed = client.get("/v1/models").get("data") or []
        entries = [entry for entry in listed if model in (None, entry.get("id"))]
        first: Mapping[str, Any] = entries[0] if entries else {}
        self.model = model or first.get("id")
        sees = (first.get("architecture") or {}).get("input_modalities") or ()
        self.takes_pictures = "image" in sees
        """Whether pictures may stand in chats."""
        self.max_len = first.get("max_model_len") or _DEFAULT_MAX_LEN
        """Tokens of a prompt and its answer, at most."""
        self.page_size = self._page_size()
        """Slots of a page, in tokens."""
        self.chat_refusal = ""
        """Why there are no chats here; empty: there are."""
        self.shapes = self._shapes()
        """The ways of asking that the server knows."""
        sample = self.send(Shape("completion", False), self._text(_NUM_SAMPLE), self.new_salt())
        self._tokens_a_word = max(sample.num_prompt_tokens, 1) / _NUM_SAMPLE

    def new_salt(self) -> str:
        """Return a salt that nobody used before."""
        return f"audit-{self._rng.getrandbits(64):016x}"

    def new_text(self, num_tokens: int) -> str:
        """Return a text of about so many tokens that nobody sent before."""
        return self._text(max(1, round(num_tokens / self._tokens_a_word)))

    def new_picture(self) -> Content:
        """Return a question about a picture that nobody sent before."""
        import base64  # noqa: PLC0415 - few servers are asked
        import io  # noqa: PLC0415

        from PIL import Image  # noqa: PLC0415

        picture = Image.new("RGB", (_SIDE, _SIDE))
        for _ in range(8):
            where = self._rng.randrange(_SIDE), self._rng.randrange(_SIDE)
            picture.putpixel(where, self._rng.getrandbits(24))
        out = io.BytesIO()
        picture.save(out, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
        return [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is this?"},
        ]

    def shuffled(self, values: Sequence[_T]) -> list[_T]:
        """Return the values in random order."""
        return self._rng.sample(values, len(values))

    def send(self, shape: Shape, content: Content, salt: str | None) -> Reply:
        """Ask for one token.

        Raises:
            ServerError: If the server refuses.
        """
        body: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        if self.model is not None:
            body["model"] = self.model
        if shape.route == "chat":
            body["messages"] = [{"role": "user", "content": content}]
        else:
            body["prompt"] = content
        if salt is not None:
            body["cache_salt"] = salt
        path = _PATHS[shape.route]
        if not shape.is_streamed:
            return _reply(self._client.post(path, body).get("usage"), 0.0)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        usage, first = None, 0.0
        for event in self._client.stream(path, body):
            usage = event.data.get("usage") or usage
            if not first and _has_token(event):
                first = event.seconds
        return _reply(usage, first)

    def _text(self, num_words: int) -> str:
        # The same words in another order: prompts that differ at once and cost the same.
        words = [_WORDS[i % len(_WORDS)] for i in range(num_words)]
        self._rng.shuffle(words)
        return f"{self._rng.getrandbits(48):012x} {' '.join(words)}"

    def _page_size(self) -> int:
        try:
            constants = self._client.get("/v1/cache/root").get("constants") or {}
        except ServerError as error:
            if error.status == 0:
                raise
            return _DEFAULT_PAGE_SIZE
        return int(constants.get("page_size", _DEFAULT_PAGE_SIZE))

    def _shapes(self) -> tuple[Shape, ...]:
        shapes = (Shape("completion", False), Shape("completion", True))
        try:
            self.send(Shape("chat", False), "hello", self.new_salt())
        except ServerError as error:
            if error.status not in (400, 404):
                raise
            self.chat_refusal = str(error)
            return shapes
        return (*shapes, Shape("chat", False), Shape("chat", True))


def _has_token(event: Event) -> bool:
    for choice in event.data.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or choice.get("finish_reason"):
            return True
    return False


def _reply(usage: object, seconds: float) -> Reply:
    fields: Mapping[str, Any] = usage if isinstance(usage, Mapping) else {}
    details = fields.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Reply(
        num_prompt_tokens=int(fields.get("prompt_tokens") or 0),
        num_cached_tokens=None if cached is None else int(cached),
        seconds=seconds,
    )
