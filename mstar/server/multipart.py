"""Forms with files (``multipart/form-data``), read whole and strictly.

Source:
    RFC 7578 and RFC 2046, section 5.1.
"""

import re
from dataclasses import dataclass
from email.message import Message

from mstar.server.failures import ApiError

MAX_PARTS = 64
_MAX_HEAD_NBYTES = 4096
_BOUNDARY = re.compile(r"[ -~]{0,69}[!-~]")


@dataclass(frozen=True)
class FormPart:
    """One field of a form."""

    name: str
    content: bytes
    file_name: str | None
    """``None``: it is a value and no file."""

    def text(self) -> str:
        """Return a value as text.

        Raises:
            ApiError: If it is no UTF-8.
        """
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ApiError(400, f"{self.name} is not valid UTF-8", param=self.name) from None


def read_form(body: bytes, content_type: str) -> list[FormPart]:
    """Return the fields of a form, in their order.

    Args:
        body: As it came.
        content_type: The header, which names the boundary.

    Raises:
        ApiError: If it is no form, has too many fields, or is cut off.
    """
    boundary = _parameters(content_type, "content-type").get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise _broken("its content type names no boundary")
    mark = b"--" + boundary.encode()
    # A line break before the first boundary may be missing.
    pieces = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(pieces) < 2:
        raise _broken("the boundary is not in it")
    *fields, end = pieces[1:]
    if not end.startswith(b"--"):
        raise _broken("it is cut off, its last boundary is missing")
    if len(fields) > MAX_PARTS:
        raise _broken(f"it has {len(fields)} fields; at most {MAX_PARTS} are taken")
    return [_part(field) for field in fields]


def _part(field: bytes) -> FormPart:
    padding, _, rest = field.partition(b"\r\n")
    head, separator, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
    if padding.strip(b" \t") or not separator or len(head) > _MAX_HEAD_NBYTES:
        raise _broken("a field has no proper head")
    headers = [line.partition(b":") for line in head.split(b"\r\n") if line]
    named = {name.strip().lower(): value.strip() for name, _, value in headers}
    disposition = named.get(b"content-disposition", b"").decode("utf-8", "replace")
    parameters = _parameters(disposition, "content-disposition")
    if "form-data" not in parameters or "name" not in parameters:
        raise _broken("a field has no name")
    return FormPart(parameters["name"], content, parameters.get("filename"))


def _parameters(value: str, header: str) -> dict[str, str]:
    """Return a header's parameters; its first word is one without a value."""
    message = Message()
    message[header] = re.sub(r"[\r\n]", " ", value)
    found = message.get_params(header=header) or []
    return {name.lower(): text for name, text in found if isinstance(text, str)}


def _broken(reason: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {reason}", code="invalid_multipart")
