"""The bytes that a request carries in text: base64 and data URLs; nothing is ever fetched."""

import base64
import binascii
import re

from mstar.errors import RequestError

_DATA_URL = re.compile(r"data:(?P<kind>[\w.+-]*(?:/[\w.+-]*)?)(?P<rest>(?:;[^,;]*)*),", re.I)
_MAX_HEAD = 200
_REMEDY = "send the content itself, as data:<type>;base64,<content>"


def decode_base64(text: str, where: str) -> bytes:
    """Return the bytes of strict base64: the standard alphabet, padded, with nothing between.

    Args:
        text: The base64.
        where: The field, for the error.

    Raises:
        RequestError: If it is anything else.
    """
    try:
        content = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
        if len(content) % 3 == 0 or text.endswith(_last_group(content)):
            return content
        reason = "bits are set behind its end"
    except UnicodeEncodeError:
        reason = "it has characters beyond ASCII"
    except binascii.Error as error:
        reason = str(error)
    raise RequestError(
        f"{where} is not valid base64: {reason:.100}; give a file's content, not its name",
        param=where,
        code="invalid_base64",
    )


def _last_group(content: bytes) -> str:
    return base64.b64encode(content[-(len(content) % 3) :]).decode()


def read_data_url(url: object, where: str) -> tuple[str, list[bytes]]:
    """Return the type and the content of a data URL.

    Several contents of one type may follow each other, separated by commas, as frames of a film do.

    Args:
        url: As the request has it.
        where: The field, for the error.

    Raises:
        RequestError: If it is no data URL in base64: addresses of other machines and file paths
            are never followed.
    """
    if not isinstance(url, str):
        raise RequestError(f"{where} is {url!r:.40}; it must be a string", param=where)
    found = _DATA_URL.match(url, 0, _MAX_HEAD)
    if found is None:
        raise RequestError(_no_data_url(url, where), param=where, code="unsupported_url")
    parameters = [part.strip().lower() for part in found["rest"].split(";")]
    if parameters[-1] != "base64":
        raise RequestError(
            f"{where} is a data URL without base64; {_REMEDY}", param=where, code="unsupported_url"
        )
    contents = url[found.end() :].split(",")
    return found["kind"].lower(), [decode_base64(part, where) for part in contents]


def data_url(content: bytes, kind: str) -> str:
    """Return the data URL of some content.

    >>> data_url(b"abc", "text/plain")
    'data:text/plain;base64,YWJj'
    """
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _no_data_url(url: str, where: str) -> str:
    scheme = url[:40].partition(":")[0].lower() if ":" in url[:40] else ""
    if scheme in ("http", "https", "ftp"):
        return f"{where} is an address ({scheme}), and this server fetches nothing; {_REMEDY}"
    if scheme == "file" or url.startswith(("/", "./", "../", "~")):
        return f"{where} is a path, and this server opens no files for requests; {_REMEDY}"
    return f"{where} is no data URL; {_REMEDY}"
