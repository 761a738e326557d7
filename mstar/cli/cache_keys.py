"""`mstar cache keys`: a request's layout, pages and keys."""

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mstar.cli.cache_arguments import add_deployment, add_json, options_of
from mstar.cli.cache_root import root_lines

if TYPE_CHECKING:
    from mstar.cli.served import Prompt, Served
    from mstar.preprocess.pages import PageView

_SHORT, _SHORT_VALUE = 12, 70


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `keys`."""
    text = "Print a request's layout and the keys of its pages; no weights are run."
    parser = commands.add_parser("keys", help=text, description=text, allow_abbrev=False)
    parser.add_argument(
        "request",
        metavar="REQUEST.json",
        help="a body as it would be sent to /v1/chat/completions or /v1/completions; - reads it",
    )
    parser.add_argument("--model", help="a model as for serve (default: what the body names)")
    parser.add_argument(
        "--short", action="store_true", help=f"print {_SHORT} characters of keys and digests"
    )
    add_deployment(parser)
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from mstar.cli.served import Body, Served  # noqa: PLC0415 - loads torch

    body = Body.read(arguments.request)
    served = Served(options_of(arguments, arguments.model or body.model))
    prompts = served.prepare(body)
    root = served.root.report()
    described = [_describe(prompt, served) for prompt in prompts]
    if arguments.json:
        print(json.dumps({"root": root, "prompts": described}, indent=2))
        return 0
    short = _SHORT if arguments.short else None
    print("\n".join(root_lines(root, _SHORT_VALUE if arguments.short else None)))
    for number, prompt in enumerate(described):
        print(f"\nprompt {number}" if len(described) > 1 else "")
        print("\n".join(_lines(prompt, short)))
    return 0


def _describe(prompt: "Prompt", served: "Served") -> dict[str, Any]:
    from mstar.preprocess.pages import layout, pages_of  # noqa: PLC0415

    subject = prompt.subject
    prepared, size = subject.prepared, subject.page_size
    spans, begin = [], 0
    for span in layout(prepared):
        spans.append(
            {
                "start": begin,
                "length": span.length,
                "kind": "ids" if span.digest is None else span.kind or "item",
                "digest": None if span.digest is None else span.digest.hex(),
                "advance": span.advance,
                "is_whole": span.is_whole,
            }
        )
        begin += span.length
    return {
        "num_tokens": subject.num_tokens,
        "page_size": size,
        "cache_salt": subject.cache_salt,
        "root": None if prepared.root is None else prepared.root.hex(),
        "layout": spans,
        "pages": [_page(page, size, served) for page in pages_of(prepared, size)],
    }


def _page(page: "PageView", page_size: int, served: "Served") -> dict[str, Any]:
    return {
        "number": page.number,
        "start": page.start,
        "num_slots": page.num_slots,
        "is_full": page.num_slots == page_size,
        "key": None if page.key is None else page.key.hex(),
        "token_ids": list(page.token_ids),
        "text": served.text_of(page.token_ids),
        "items": [
            {
                "start": item.start,
                "offset": item.offset,
                "length": item.length,
                "digest": item.digest.hex(),
            }
            for item in page.items
        ],
        "end_keys": [{"end": end, "key": key.hex()} for end, key in page.end_keys],
    }


def _lines(prompt: Mapping[str, Any], short: int | None) -> Iterator[str]:
    num_pages = len(prompt["pages"])
    salt = "no cache_salt" if prompt["cache_salt"] is None else f"salt {prompt['cache_salt']!r}"
    yield (
        f"{prompt['num_tokens']} tokens on {num_pages} pages of {prompt['page_size']}, {salt}; "
        f"request root {_cut(prompt['root'], short)}"
    )
    yield "layout"
    for span in prompt["layout"]:
        slots = f"slots {span['start']}-{span['start'] + span['length'] - 1}"
        yield f"  {slots:<16} {_span(span, short)}"
    for page in prompt["pages"]:
        yield from _page_lines(page, short)


def _span(span: Mapping[str, Any], short: int | None) -> str:
    if span["digest"] is None:
        return f"{span['length']} ids"
    advance = "" if span["advance"] is None else f", moves positions by {span['advance']}"
    whole = ", computed in one step" if span["is_whole"] else ""
    return f"{span['kind']} of {span['length']} {_cut(span['digest'], short)}{advance}{whole}"


def _page_lines(page: Mapping[str, Any], short: int | None) -> Iterator[str]:
    last = page["start"] + page["num_slots"] - 1
    open_end = "" if page["is_full"] else "  (not full: never shared as it is)"
    key = _cut(page["key"], short)
    yield f"page {page['number']}  slots {page['start']}-{last}  {key}{open_end}"
    if page["token_ids"]:
        yield f"    ids   {json.dumps(page['text'], ensure_ascii=False)}"
    for item in page["items"]:
        begin, end = (
            item["start"],
            min(item["start"] + item["length"] - item["offset"], page["num_slots"]),
        )
        yield (
            f"    item  its slots {item['offset']}-{item['offset'] + end - begin - 1} of "
            f"{item['length']} at {page['start'] + begin}  {_cut(item['digest'], short)}"
        )
    for cut in page["end_keys"]:
        yield f"    end   after slot {page['start'] + cut['end'] - 1}  {_cut(cut['key'], short)}"


def _cut(text: str | None, short: int | None) -> str:
    return "none: never shared" if text is None else text[:short]
