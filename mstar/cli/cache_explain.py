"""`mstar cache explain`: how far a request reuses what was there before, and what stops it."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mstar.cli.cache_arguments import (
    add_deployment,
    add_json,
    add_server,
    client_of,
    options_of,
)
from mstar.errors import RequestError

if TYPE_CHECKING:
    from mstar.cli.served import Body, Prompt, Served
    from mstar.preprocess.explain import Difference, Explanation, Stop

ROUTE = "/v1/cache/explain"
_MOST_TEXT, _MOST_VALUE = 100, 80


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `explain`."""
    text = (
        "Say how far B.json can reuse what A.json computes and what stops it; with A.json alone, "
        "how far a running server can reuse what it has."
    )
    parser = commands.add_parser("explain", help=text, description=text, allow_abbrev=False)
    parser.add_argument("a", metavar="A.json", help="a request body; - reads it")
    parser.add_argument("b", metavar="B.json", nargs="?", help="the request that comes after it")
    parser.add_argument("--model", help="a model as for serve (default: what each body names)")
    add_deployment(parser)
    add_server(parser)
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import msgspec  # noqa: PLC0415

    from mstar.cli.served import Body  # noqa: PLC0415 - loads torch
    from mstar.preprocess.explain import Explanation  # noqa: PLC0415

    a = Body.read(arguments.a)
    if arguments.b is None:
        answer = client_of(arguments).post(ROUTE, a.fields())
        explanation = msgspec.convert(answer, Explanation)
        names = ("what the server has", arguments.a)
    else:
        explanation = _compare(arguments, a, Body.read(arguments.b))
        names = (arguments.a, arguments.b)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(explanation)).decode())
    else:
        print("\n".join(explanation_lines(explanation, *names)))
    return 0


def _compare(arguments: argparse.Namespace, a: "Body", b: "Body") -> "Explanation":
    from mstar.cli.served import Served  # noqa: PLC0415 - loads torch
    from mstar.preprocess.explain import explain  # noqa: PLC0415

    models = [arguments.model or body.model for body in (a, b)]
    first = Served(options_of(arguments, models[0]))
    second = first if models[0] == models[1] else Served(options_of(arguments, models[1]))
    prompts = _only(first, a), _only(second, b)
    explanation = explain(prompts[0].subject, prompts[1].subject, second.text_of)
    return _with_places(explanation, *prompts)


def _only(served: "Served", body: "Body") -> "Prompt":
    prompts = served.prepare(body)
    if len(prompts) != 1:
        raise RequestError(
            f"{body.path} has {len(prompts)} prompts; explain compares one with one: split it"
        )
    return prompts[0]


def _with_places(explanation: "Explanation", a: "Prompt", b: "Prompt") -> "Explanation":
    """Return the explanation of two chats with the message that each differs in."""
    import msgspec  # noqa: PLC0415

    from mstar.preprocess.explain import find_in_chat, num_common  # noqa: PLC0415

    differs = explanation.stopped.differs
    if (
        differs is None
        or differs.field not in ("token", "layout")
        or not (a.rendered and b.rendered)
    ):
        return explanation
    at = num_common(a.rendered, b.rendered)
    differs = msgspec.structs.replace(
        differs,
        a_where=find_in_chat(a.rendered, a.messages, at),
        b_where=find_in_chat(b.rendered, b.messages, at),
    )
    stopped = msgspec.structs.replace(explanation.stopped, differs=differs)
    return msgspec.structs.replace(explanation, stopped=stopped)


def explanation_lines(explanation: "Explanation", a: str, b: str) -> Iterator[str]:
    """Yield an explanation as lines for a person.

    Args:
        explanation: What is said.
        a: What was there before.
        b: The request that may reuse.
    """
    found, stopped = explanation, explanation.stopped
    share = 100 * found.num_matched_tokens / max(found.num_prompt_tokens, 1)
    yield (
        f"{b} reuses {found.num_matched_tokens} of its {found.num_prompt_tokens} tokens "
        f"({share:.0f} %): {found.pages} whole pages of {found.page_size}" + _cut_page(found)
    )
    tiers = {tier: count for tier, count in found.by_tier.items() if count}
    if len(tiers) > 1 or (tiers and "device" not in tiers):
        yield "  " + ", ".join(f"{count} from {tier}" for tier, count in tiers.items())
    yield f"it stops at page {stopped.page}, slot {stopped.slot}: {_reason(found, a)}"
    if stopped.differs is not None:
        yield from _difference_lines(stopped.differs, a, b)
        if stopped.differs.field in ("root_constant", "cache_salt") and found.num_common_tokens:
            yield f"  apart from that, the first {found.num_common_tokens} tokens are the same"


def _cut_page(found: "Explanation") -> str:
    rest = found.num_matched_tokens - found.pages * found.page_size
    return f" and {rest} slots of the next, up to the end of an item" if rest else ""


def _reason(found: "Explanation", a: str) -> str:
    stopped = found.stopped
    match stopped.reason:
        case "end":
            return (
                "the prompt ends; at least one token is always computed, and a page is shared "
                "whole or up to the end of an item"
            )
        case "other_ends":
            return f"{a} ends there, and a page is shared once it is full"
        case "never_seen":
            return "no request has filled this page under the same root and salt"
        case "evicted":
            return f"the page was forgotten{_ago(stopped)}; it had to make room"
        case "shut":
            return "the cache is shut; `mstar cache root` says why"
        case "differs":
            return _WORDS[stopped.differs.field] if stopped.differs else "the two differ"


_WORDS = {
    "root_constant": "the deployments differ",
    "cache_salt": "the cache_salt differs, and requests with different salts share nothing",
    "token": "another token",
    "item": "another item",
    "layout": "an item on one side and a token on the other",
}


def _ago(stopped: "Stop") -> str:
    return "" if stopped.evicted_at is None else f" {stopped.evicted_at:.1f} s ago"


def _difference_lines(differs: "Difference", a: str, b: str) -> Iterator[str]:
    from mstar.preprocess.explain import num_common  # noqa: PLC0415

    if differs.before:
        yield f"  both       …{_quoted(differs.before, is_end=True)}"
    name = f"{differs.name} = " if differs.name else ""
    width = max(len(a), len(b))
    # Long values are shown from shortly before where they part.
    begin = max(0, num_common(differs.a or "", differs.b or "") - _MOST_VALUE // 4)
    for label, value, text, where in (
        (a, differs.a, differs.a_text, differs.a_where),
        (b, differs.b, differs.b_text, differs.b_where),
    ):
        shown = "none" if value is None else _around(value, begin)
        after = f"  {_quoted(text)}…" if text else ""
        place = f"  in {where}" if where else ""
        yield f"  {label:<{width}}  {name}{shown}{after}{place}"
    if differs.a_where.startswith("the template's own") and differs.a_where == differs.b_where:
        yield "  the messages up to there are the same: the chat template wrote something else"
    if differs.others:
        yield f"  further differences: {', '.join(differs.others)}"


def _around(value: str, begin: int) -> str:
    if len(value) <= _MOST_VALUE:
        return value
    part = value[begin : begin + _MOST_VALUE]
    return f"{'…' if begin else ''}{part}{'…' if begin + _MOST_VALUE < len(value) else ''}"


def _quoted(text: str, is_end: bool = False) -> str:
    return repr(text[-_MOST_TEXT:] if is_end else text[:_MOST_TEXT])
