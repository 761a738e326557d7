"""Failures as clients see them."""

import json

import pytest

from mstar.server.failures import MAX_MESSAGE_LEN, ApiError


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", "invalid_value"),
        (401, "authentication_error", "invalid_api_key"),
        (404, "invalid_request_error", "not_found"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "server_busy"),
        (500, "server_error", "internal_error"),
        (503, "service_unavailable", "unavailable"),
        (418, "invalid_request_error", "error"),
    ],
)
def test_status_gives_type_and_code(status: int, kind: str, code: str) -> None:
    assert json.loads(ApiError(status, "m").body()) == {
        "error": {"message": "m", "type": kind, "param": None, "code": code}
    }


def test_long_messages_and_params_are_cut() -> None:
    body = json.loads(ApiError(400, "x" * 10**6, param="y" * 10**6).body())["error"]
    assert len(body["message"]) == MAX_MESSAGE_LEN
    assert len(body["param"]) == 200


def test_text_that_is_no_unicode_is_still_answered() -> None:
    assert "?" in json.loads(ApiError(400, "\ud800").body())["error"]["message"]


def test_retry_and_authentication_headers() -> None:
    assert ApiError(429, "m", retry_after=3).headers == {"Retry-After": "3"}
    assert ApiError(401, "m").headers == {"WWW-Authenticate": "Bearer"}
    assert ApiError(400, "m").headers == {}
