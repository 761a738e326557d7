"""What a worker says of bodies, without a process."""

import json
from types import SimpleNamespace

import pytest

from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.protocol import ProtocolRules
from mstar.server.worker import Worker
from mstar.transport.messages import Configure, Prepare, PrepareFailed, Route
from tests.server.fakes import FACTS

MESSAGES = [{"role": "user", "content": "x"}]
SILENT = SimpleNamespace(tasks=frozenset({"transcription"}))


def asked(processor: object, route: Route, fields: dict[str, object]) -> PrepareFailed:
    worker = Worker(TextTokenizer.empty(), ProtocolRules(model_names=("tiny",)), processor)
    worker.configure(Configure(facts=FACTS))
    body = json.dumps(fields).encode()
    answer = worker.handle(Prepare(job_id=1, request_id="a", route=route, body=body))
    assert isinstance(answer, PrepareFailed)
    return answer


@pytest.mark.parametrize(
    ("processor", "route", "fields", "message"),
    [
        (None, "image", {"prompt": "x", "response_format": "url"}, "makes no pictures"),
        (None, "speech", {"input": "x", "response_format": "aac"}, "does not speak"),
        (
            SILENT,
            "chat",
            {"messages": MESSAGES, "response_format": {"type": "json_object"}},
            "answers no chats",
        ),
        (SILENT, "completion", {"prompt": "x", "max_tokens": 0}, "continues no texts"),
    ],
)
def test_what_the_model_cannot_do_comes_before_what_is_wrong_with_the_body(
    processor: object, route: Route, fields: dict[str, object], message: str
) -> None:
    answer = asked(processor, route, fields)
    assert (answer.status, answer.error.code) == (400, "capability_missing")
    assert message in answer.error.message


@pytest.mark.parametrize(
    ("route", "fields"), [("image", {"prompt": "x"}), ("chat", {"messages": MESSAGES})]
)
def test_a_model_that_is_not_here_is_told_of_first(route: Route, fields: dict[str, object]) -> None:
    answer = asked(SILENT, route, fields | {"model": "other"})
    assert (answer.status, answer.error.code) == (404, "model_not_found")


class _Unlucky:
    """Does something for which the machine has no room."""

    @property
    def tasks(self) -> frozenset[str]:
        raise OSError(28, "No space left on device")


def test_a_machine_without_room_fails_the_request_and_not_the_worker() -> None:
    answer = asked(_Unlucky(), "chat", {"messages": MESSAGES})
    assert (answer.status, answer.error.code) == (500, "internal_error")
    assert "space" not in answer.error.message
