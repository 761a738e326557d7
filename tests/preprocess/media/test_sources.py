import base64

import pytest
from hypothesis import given, strategies as st

from mstar.errors import RequestError
from mstar.preprocess.media.sources import data_url, decode_base64, read_data_url


@given(st.binary(max_size=200))
def test_content_comes_back(content: bytes) -> None:
    text = base64.b64encode(content).decode()
    assert decode_base64(text, "x") == content
    assert read_data_url(data_url(content, "image/png"), "x") == ("image/png", [content])


@pytest.mark.parametrize(
    "text", ["a", "ab==c", "YQ", "YQ=", "Y Q==", "YQ==\n", "YQ==YQ==", "-_-_", "ä", "YR==", "="]
)
def test_base64_is_strict(text: str) -> None:
    with pytest.raises(RequestError, match=r"here is not valid base64") as caught:
        decode_base64(text, "here")
    assert (caught.value.param, caught.value.code) == ("here", "invalid_base64")


@given(st.text(max_size=40))
def test_any_text_is_base64_or_refused(text: str) -> None:
    try:
        content = decode_base64(text, "x")
    except RequestError:
        return
    assert base64.b64encode(content).decode() == text


def test_several_contents_are_frames_of_one_film() -> None:
    url = "data:video/jpeg;base64,YQ==,Yg==,Yw=="
    assert read_data_url(url, "x") == ("video/jpeg", [b"a", b"b", b"c"])


@pytest.mark.parametrize(
    "url",
    [
        "DATA:Image/PNG;BASE64,YQ==",
        "data:image/png;charset=utf-8;base64,YQ==",
        "data:image/png; base64,YQ==",
    ],
)
def test_spelling_of_the_head_is_free(url: str) -> None:
    assert read_data_url(url, "x") == ("image/png", [b"a"])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1/x.png", r"an address \(http\), and this server fetches nothing"),
        ("HTTPS://example.com/x.png", r"an address \(https\)"),
        ("file:///etc/passwd", "a path, and this server opens no files"),
        ("/etc/passwd", "a path"),
        ("../x.png", "a path"),
        ("x.png", "no data URL"),
        ("", "no data URL"),
        ("data:image/png,abc", "without base64"),
        ("data:image/png;base64", "no data URL"),
        ("data:" + "x" * 500 + ";base64,YQ==", "no data URL"),
        (None, "must be a string"),
        (["data:image/png;base64,YQ=="], "must be a string"),
    ],
)
def test_what_is_no_data_url_is_refused_and_never_followed(url: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_data_url(url, "x")
    assert caught.value.param == "x"
    assert len(caught.value.message) < 300
