"""`mstar cache audit`: an operator's proof that tenants of a running server share nothing.

It sends prompts that nobody sent before, under salts that nobody used before, and looks at what a
client can see: the cached tokens that answers report, and the time to the first token.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from mstar.cli.cache_arguments import add_json, add_server, client_of
from mstar.cli.client import ServerError
from mstar.cli.parser import at_least
from mstar.cli.probe import Content, Probe, Reply, Shape
from mstar.cli.ranks import detectable_shift, rank_test

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

_ALPHA = 0.001
"""Likelihood below which two samples of times count as different."""
_MIN_ROUNDS = 8
_TIMED = Shape("completion", True)
_NOT_REPORTED = "answers have no cached_tokens in their usage"
_PUBLIC = (None, "None", "null", " ")
"""Salts that others may use as well."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    check: str
    detail: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two requests in a row, each under a salt; the second must share, or must not."""

    name: str
    first: str | None
    second: str | None
    shares: bool = False
    heads: tuple[str, str] = ("", "")
    """What the prompt begins with, the first time and the second."""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `audit`."""
    text = (
        "Prove on a running server that requests with different cache_salt share nothing, as far "
        "as a client can see: reported tokens and times. Exit status 0: every line passed."
    )
    parser = commands.add_parser("audit", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--model", help="the name that requests use (default: the first served)")
    parser.add_argument(
        "--rounds",
        type=at_least(_MIN_ROUNDS),
        default=20,
        metavar="N",
        help="measurements of each time; more see smaller differences (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=at_least(64),
        default=1024,
        metavar="N",
        help="length of timed prompts, in tokens (default: %(default)s)",
    )
    add_server(parser)
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    probe = Probe(client_of(arguments), arguments.model, random.SystemRandom())
    if not arguments.json:
        print(f"auditing {arguments.url}: model {probe.model}, {len(probe.shapes)} ways of asking")
    findings = []
    for finding in audit(probe, arguments.rounds, arguments.prompt_tokens):
        findings.append(finding)
        if not arguments.json:
            line = f"{finding.verdict:<12}  {finding.check:<38}  {finding.detail}"
            print(line, flush=True)
    is_proven = all(finding.verdict == "PASS" for finding in findings)
    if arguments.json:
        report = {"passed": is_proven, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        num_passed = sum(finding.verdict == "PASS" for finding in findings)
        print(f"{num_passed} of {len(findings)} checks passed")
    return 0 if is_proven else 1


def audit(probe: Probe, num_rounds: int, num_tokens: int) -> Iterator[Finding]:
    """Yield a finding for every check.

    Args:
        probe: Of the server.
        num_rounds: Measurements of each kind of time.
        num_tokens: Length of timed prompts, in tokens.
    """
    if probe.chat_refusal:
        yield Finding("INCONCLUSIVE", "chats", f"not checked: {probe.chat_refusal}")
    num_short = min(max(3 * probe.page_size, 96), probe.max_len // 2)
    # Salts of its own for every way of asking: what one has left must not help another.
    for same in zip(*(pairings(probe) for _ in probe.shapes), strict=True):
        yield check_pairing(probe, dict(zip(probe.shapes, same, strict=True)), num_short)
    yield check_empty_salt(probe, num_short)
    length = min(num_tokens, probe.max_len * 3 // 4)
    try:
        times = measure(probe, num_rounds, _TIMED, lambda: probe.new_text(length))
    except ServerError as error:
        yield Finding("INCONCLUSIVE", "time to the first token", str(error))
    else:
        yield from check_times(times)
    if probe.takes_pictures and not probe.chat_refusal:
        yield from check_pictures(probe, num_rounds)


def pairings(probe: Probe) -> list[Pairing]:
    """Return pairs of salts, the same ones and different ones, that nobody used before."""
    salt = probe.new_salt
    same, wide, base = salt(), salt() + "-\u00e9\u6f22\U0001f600", salt()
    return [
        Pairing("the same salt", same, same, shares=True),
        Pairing("no salt twice", None, None, shares=True),
        Pairing("the same salt beyond ASCII", wide, wide, shares=True),
        Pairing("a salt, then another", salt(), salt()),
        Pairing("no salt, then a salt", None, salt()),
        Pairing("a salt, then no salt", salt(), None),
        Pairing("no salt, then 'None'", None, "None"),
        Pairing("no salt, then 'null'", None, "null"),
        Pairing("no salt, then a space", None, " "),
        Pairing("another last character", f"{base}1", f"{base}2"),
        Pairing("another first character", f"1{base}", f"2{base}"),
        Pairing("a space behind the salt", f"{base}3", f"{base}3 "),
        Pairing("the salt in capitals", f"{base}x", f"{base}x".upper()),
        Pairing("a letter as one character and as two", f"{base}\u00e9", f"{base}e\u0301"),
        Pairing("…a with text bc…, then …ab with c…", f"{base}a", f"{base}ab", heads=("bc", "c")),
        Pairing("…mb with text c…, then …m with bc…", f"{base}mb", f"{base}m", heads=("c", "bc")),
    ]


def check_pairing(probe: Probe, pairing_of: Mapping[Shape, Pairing], num_tokens: int) -> Finding:
    """Send a prompt twice in every way of asking and look at what each time reuses.

    Args:
        probe: Of the server.
        pairing_of: The same pair of salts for every way, except that nobody used them before.
        num_tokens: Length of the prompts, in tokens.
    """
    first = next(iter(pairing_of.values()))
    seen: list[_Seen] = []
    try:
        for shape, pairing in pairing_of.items():
            seen.append(_send_twice(probe, shape, pairing, num_tokens))
    except _NothingReported:
        return Finding("INCONCLUSIVE", first.name, _NOT_REPORTED)
    except ServerError as error:
        return Finding("INCONCLUSIVE", first.name, str(error))
    wanted = "must share" if first.shares else "must not share"
    wrong = [one for one in seen if not one.is_right]
    if wrong:
        return Finding("FAIL", first.name, f"{wanted}; {'; '.join(one.text for one in wrong)}")
    counts = [one.num_shared for one in seen]
    least = f"{min(counts)} to " if min(counts) < max(counts) else ""
    return Finding("PASS", first.name, f"{wanted}; shared {least}{max(counts)} tokens")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the second of two requests reused."""

    is_right: bool
    num_shared: int
    """Tokens beyond those that any text may reuse under the same salt."""
    text: str


class _NothingReported(Exception):
    """The server does not say what it reused."""


def _send_twice(probe: Probe, shape: Shape, pairing: Pairing, num_tokens: int) -> _Seen:
    text = probe.new_text(num_tokens)
    anyway = [_anyway(probe, shape, salt, num_tokens) for salt in (pairing.first, pairing.second)]
    first = _cached(probe.send(shape, pairing.heads[0] + text, pairing.first))
    reply = probe.send(shape, pairing.heads[1] + text, pairing.second)
    second = _cached(reply)
    found = f"reused {second} of {reply.num_prompt_tokens} tokens ({shape})"
    num_shared = max(0, second - anyway[1])
    if first > anyway[0]:
        return _Seen(False, num_shared, f"{found}, and {first} at first sight")
    return _Seen((num_shared > 0) is pairing.shares, num_shared, found)


def _anyway(probe: Probe, shape: Shape, salt: str | None, num_tokens: int) -> int:
    """Return the tokens that a text nobody sent before may reuse under a salt.

    Under a salt that is new it is none. Under one that others may use, a chat template begins all
    prompts alike, and they rightly share that.
    """
    if salt not in _PUBLIC:
        return 0
    probe.send(shape, probe.new_text(num_tokens), salt)
    return _cached(probe.send(shape, probe.new_text(num_tokens), salt))


def _cached(reply: Reply) -> int:
    if reply.num_cached_tokens is None:
        raise _NothingReported
    return reply.num_cached_tokens


def check_empty_salt(probe: Probe, num_tokens: int) -> Finding:
    """Look at whether an empty salt is refused, or else kept apart from no salt."""
    name, shape = "an empty salt", probe.shapes[0]
    text = probe.new_text(num_tokens)
    try:
        anyway = _anyway(probe, shape, None, num_tokens)
        probe.send(shape, text, None)
        cached = _cached(probe.send(shape, text, ""))
    except _NothingReported:
        return Finding("INCONCLUSIVE", name, _NOT_REPORTED)
    except ServerError as error:
        if error.status in (400, 422):
            return Finding("PASS", name, "is refused")
        return Finding("INCONCLUSIVE", name, str(error))
    verdict: Verdict = "PASS" if cached <= anyway else "FAIL"
    return Finding(verdict, name, f"is taken after no salt; reused {cached} tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Times to the first token, in seconds."""

    cold: Sequence[float]
    """Prompts that nobody sent before."""
    warm: Sequence[float]
    """Prompts sent before under the same salt."""
    cross: Sequence[float]
    """Prompts sent before under another salt."""


def check_pictures(probe: Probe, num_rounds: int) -> Iterator[Finding]:
    """Yield whether tenants share pictures: what answers report, and times."""
    shape, name = Shape("chat", True), "a picture under another salt"
    picture, salt = probe.new_picture(), probe.new_salt()
    try:
        probe.send(shape, picture, salt)
        same, other = (_cached(probe.send(shape, picture, own)) for own in (salt, probe.new_salt()))
        times = measure(probe, num_rounds, shape, probe.new_picture)
    except _NothingReported:
        yield Finding("INCONCLUSIVE", name, _NOT_REPORTED)
        return
    except ServerError as error:
        yield Finding("INCONCLUSIVE", name, str(error))
        return
    detail = f"must not share; shared {other} tokens, and {same} under the same salt"
    yield Finding("FAIL" if other else "PASS" if same else "INCONCLUSIVE", name, detail)
    yield from check_times(times, " of pictures")


def measure(probe: Probe, num_rounds: int, shape: Shape, make: Callable[[], Content]) -> Times:
    """Return times of the three kinds, taken in turns of random order.

    Args:
        probe: Of the server.
        num_rounds: Measurements of each kind.
        shape: How to ask; streamed.
        make: Returns a prompt that nobody sent before.

    Raises:
        ServerError: If the server refuses.
    """
    times: dict[str, list[float]] = {"cold": [], "warm": [], "cross": []}
    for _ in range(num_rounds):
        content, salt = make(), probe.new_salt()
        probe.send(shape, content, salt)
        asks = [
            ("cold", make(), probe.new_salt()),
            ("warm", content, salt),
            ("cross", content, probe.new_salt()),
        ]
        for kind, own, own_salt in probe.shuffled(asks):
            times[kind].append(probe.send(shape, own, own_salt).seconds)
    return Times(**times)


def check_times(times: Times, what: str = "") -> Iterator[Finding]:
    """Yield whether a prompt known under another salt takes as long as an unknown one.

    That says something only where a prompt known under the same salt is seen to take less.

    Args:
        times: In seconds.
        what: Was asked, where it is no text.
    """
    gain = median(times.cold) - median(times.warm)
    visible = detectable_shift(times.cold, times.cross, _ALPHA)
    medians = ", ".join(
        f"{kind} {1000 * median(getattr(times, kind)):.1f} ms" for kind in ("cold", "warm", "cross")
    )
    detail = f"medians of {len(times.cold)}: {medians}"
    p_warm = rank_test(times.cold, times.warm)
    is_sharp = p_warm < _ALPHA and gain > 0 and visible <= gain
    verdict: Verdict = "PASS" if is_sharp else "INCONCLUSIVE"
    yield Finding(
        verdict,
        f"time{what} under the same salt",
        f"reuse must show; {detail}, p = {p_warm:.1g}; it saves {1000 * gain:.1f} ms; a "
        f"difference of {1000 * visible:.1f} ms could have been seen"
        f"{'' if is_sharp else ': too coarse to judge by'}",
    )
    p_cross = rank_test(times.cold, times.cross)
    p_hit = rank_test(times.warm, times.cross)
    if p_cross < _ALPHA:
        verdict = "FAIL"
    elif not is_sharp or p_hit >= _ALPHA:
        verdict = "INCONCLUSIVE"
    yield Finding(
        verdict,
        f"time{what} under another salt",
        f"must be as cold; against cold p = {p_cross:.1g} (below {_ALPHA}: they differ), against "
        f"warm p = {p_hit:.1g}; less than {1000 * visible:.1f} ms would not have been seen",
    )
