import pytest

from mstar.cli.client import Client, ServerError
from mstar.errors import ConfigError
from tests.cli.fake_server import fake_server

BODY = {"prompt": "hello", "stream": False}


def test_a_body_is_sent_and_the_answer_read() -> None:
    with fake_server() as url:
        answer = Client(url).post("/v1/completions", BODY)
        assert answer["usage"]["prompt_tokens"] == 5
        assert Client(f"{url}/").get("/v1/models")["data"][0]["id"] == "fake"


def test_a_streams_events_come_in_order_with_their_times() -> None:
    with fake_server() as url:
        events = list(Client(url).stream("/v1/completions", {**BODY, "stream": True}))
    assert [bool(event.data["choices"]) for event in events] == [True, False]
    assert 0 < events[0].seconds <= events[1].seconds


def test_a_refusal_carries_the_servers_words_and_status() -> None:
    with (
        fake_server() as url,
        pytest.raises(ServerError, match="404: there is no route /x") as seen,
    ):
        Client(url).get("/x")
    assert seen.value.status == 404


def test_nobody_there_is_told_with_the_address() -> None:
    with pytest.raises(ServerError, match=r"no answer from http://127\.0\.0\.1:9") as seen:
        Client("http://127.0.0.1:9").get("/v1/models")
    assert seen.value.status == 0
    with pytest.raises(ServerError, match="no answer"):
        list(Client("http://127.0.0.1:9").stream("/v1/completions", BODY))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        Client(url)
