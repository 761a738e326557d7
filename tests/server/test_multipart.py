import pytest
from hypothesis import given, strategies as st

from mstar.server.failures import ApiError
from mstar.server.multipart import MAX_PARTS, FormPart, read_form

TYPE = "multipart/form-data; boundary=xyz"


def form(*fields: tuple[str, bytes], boundary: bytes = b"xyz") -> bytes:
    parts = [b"--" + boundary + b"\r\n" + head.encode() + b"\r\n\r\n" + c for head, c in fields]
    return b"\r\n".join([*parts, b"--" + boundary + b"--\r\n"])


def named(name: str, file_name: str | None = None) -> str:
    more = "" if file_name is None else f'; filename="{file_name}"\r\nContent-Type: audio/wav'
    return f'Content-Disposition: form-data; name="{name}"{more}'


@given(st.lists(st.binary(max_size=80).filter(lambda c: b"--xyz" not in c), max_size=6))
def test_contents_come_back_byte_by_byte(contents: list[bytes]) -> None:
    body = form(*((named(f"n{i}", "x.wav"), content) for i, content in enumerate(contents)))
    found = read_form(body, TYPE)
    assert found == [FormPart(f"n{i}", content, "x.wav") for i, content in enumerate(contents)]


def test_values_are_text_and_files_have_names() -> None:
    value, file = read_form(
        form((named("a"), "é".encode()), (named("f", "x y.wav"), b"\xff")), TYPE
    )
    assert (value.name, value.text(), value.file_name) == ("a", "é", None)
    assert (file.name, file.content, file.file_name) == ("f", b"\xff", "x y.wav")
    with pytest.raises(ApiError, match="f is not valid UTF-8"):
        file.text()


@pytest.mark.parametrize(
    "content_type", [TYPE, 'multipart/form-data; charset=utf-8; boundary="xyz"', TYPE.upper()]
)
def test_boundaries_may_be_quoted(content_type: str) -> None:
    body = form((named("a"), b"1"))
    if content_type.isupper():
        body = body.replace(b"xyz", b"XYZ")
    assert [part.name for part in read_form(body, content_type)] == ["a"]


def test_content_may_look_like_the_end_of_something_else() -> None:
    content = b"\r\n--other--\r\n\r\n--xy"
    assert read_form(form((named("a"), content)), TYPE)[0].content == content


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"", TYPE, "boundary is not in it"),
        (form((named("a"), b"1")), "multipart/form-data", "names no boundary"),
        (form((named("a"), b"1")), "multipart/form-data; boundary=", "names no boundary"),
        (form((named("a"), b"1")), TYPE + "abc", "boundary is not in it"),
        (form((named("a"), b"1"))[:-9], TYPE, "cut off"),
        (form(("X: y", b"1")), TYPE, "has no name"),
        (form(("Content-Disposition: attachment; name=a", b"1")), TYPE, "has no name"),
        (b"--xyz\r\nno head--xyz\r\n--xyz--", TYPE, "no proper head"),
        (form((named("a" * 5000), b"1")), TYPE, "no proper head"),
        (form(*[(named("a"), b"")] * (MAX_PARTS + 1)), TYPE, f"at most {MAX_PARTS}"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, content_type: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        read_form(body, content_type)
    assert (caught.value.status, caught.value.error.code) == (400, "invalid_multipart")


@given(st.binary(max_size=200), st.text(max_size=40))
def test_any_bytes_are_a_form_or_a_clear_error(noise: bytes, boundary: str) -> None:
    for body in (noise, b"--xyz\r\n" + noise + b"\r\n--xyz--", noise + form((named("a"), b"1"))):
        for content_type in (TYPE, f"multipart/form-data; boundary={boundary}"):
            failure: ApiError | None = None
            try:
                read_form(body, content_type)
            except ApiError as error:
                failure = error
            assert failure is None or failure.status == 400
