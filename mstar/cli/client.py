"""A small HTTP client for servers of ours: JSON in and out, and streams with their times."""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mstar.errors import ConfigError, MstarError

DEFAULT_URL = "http://127.0.0.1:8000"


class ServerError(MstarError):
    """A server refused a request, or could not be reached.

    Args:
        message: What happened, with the server's own words.
        status: HTTP status; 0: there was no answer.
        param: The field at fault, where the server names one.
    """

    def __init__(self, message: str, status: int = 0, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream."""

    seconds: float
    """When it came, from when the request was sent."""
    data: dict[str, Any]


class Client:
    """Talks to one server, over a connection for each request.

    Args:
        url: Where it is, as ``http://127.0.0.1:8000``; a path is put before every route.
        api_key: Sent as a bearer token.
        timeout: Longest silence to wait for, in seconds.

    Raises:
        ConfigError: If the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"the URL {url!r} is wrong: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the URL {url!r} is wrong; write it as {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/")
        self._timeout = timeout
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def get(self, route: str) -> dict[str, Any]:
        """Return the object that a route answers.

        Raises:
            ServerError: If it answers anything else than an object and 200.
        """
        return self._call("GET", route, None)

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object that a route answers to a body.

        Raises:
            ServerError: If it answers anything else than an object and 200.
        """
        return self._call("POST", route, json.dumps(body).encode())

    def stream(self, route: str, body: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a stream as they come, up to its end.

        Raises:
            ServerError: If it answers no stream, or an error inside of it.
        """
        connection = self._connect()
        try:
            started = time.perf_counter()
            answer = self._send(connection, "POST", route, json.dumps(body).encode())
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    return
                data = _object(text, self.url + route)
                if "error" in data:
                    raise ServerError(f"{self.url}{route}: {_reason(data)}", answer.status)
                yield Event(time.perf_counter() - started, data)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _call(self, method: str, route: str, body: bytes | None) -> dict[str, Any]:
        connection = self._connect()
        try:
            return _object(self._send(connection, method, route, body).read(), self.url + route)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, route: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        headers = self._headers | ({} if body is None else {"content-type": "application/json"})
        connection.request(method, self._prefix + route, body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read()
            param = None
            try:
                told = _object(text, route)
                reason, param = _reason(told), _param(told)
            except ServerError:
                reason = text.decode("utf-8", "replace")[:200]
            message = f"{self.url}{route} answered {answer.status}: {reason}"
            raise ServerError(message, answer.status, param)
        return answer

    def _unreachable(self, error: Exception) -> ServerError:
        reason = str(error) or type(error).__name__
        return ServerError(f"no answer from {self.url} ({reason}); is `mstar serve` running there?")


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"{where} answered what is no JSON object: {text[:100]!r}")
    return value


def _reason(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message") if isinstance(error, dict) else error or dict(body))[:500]


def _param(body: Mapping[str, Any]) -> str | None:
    error = body.get("error")
    param = error.get("param") if isinstance(error, dict) else None
    return param if isinstance(param, str) else None
