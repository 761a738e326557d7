import json

import pytest

from mstar.cli import main
from mstar.cli.cache_audit import Times, check_times
from tests.cli.fake_server import fake_server
from tests.server.processes import ServerProcess

Report = dict[str, tuple[str, str]]


def audit(url: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Report]:
    """Return exit status, and verdict and detail of every check."""
    capsys.readouterr()
    flags = ("--rounds", "12", "--prompt-tokens", "256", *flags)
    status = main(["cache", "audit", "--url", url, "--json", *flags])
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is (status == 0)
    return status, {one["check"]: (one["verdict"], one["detail"]) for one in report["findings"]}


def failed(report: Report) -> set[str]:
    return {check for check, (verdict, _) in report.items() if verdict == "FAIL"}


def test_a_server_that_keeps_salts_apart_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as url:
        status, report = audit(url, capsys)
    assert {verdict for verdict, _ in report.values()} == {"PASS"}, report
    assert status == 0
    assert report["an empty salt"] == ("PASS", "is refused")
    assert len(report) >= 19


def test_a_server_that_ignores_salts_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server("ignores") as url:
        status, report = audit(url, capsys)
    assert status == 1
    assert {"a salt, then another", "no salt, then a salt", "a salt, then no salt"} <= failed(
        report
    )
    assert "time under another salt" in failed(report)
    assert report["the same salt"][0] == "PASS"


def test_a_server_that_leaks_by_its_times_alone_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server("timing") as url:
        status, report = audit(url, capsys)
    assert failed(report) == {"time under another salt"}
    assert status == 1


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("sees", set()),
        ("peeks", {"time of pictures under another salt"}),
        ("mixes", {"a picture under another salt", "time of pictures under another salt"}),
    ],
)
def test_pictures_are_audited_where_they_are_taken(
    fault: str, checks: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture that another tenant had sent once came back sooner: its pixels were remembered."""
    with fake_server(fault) as url:
        status, report = audit(url, capsys)
    assert failed(report) == checks
    assert status == bool(checks)
    assert report["time of pictures under the same salt"][0] == "PASS"


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("joins", {"…a with text bc…, then …ab with c…", "…mb with text c…, then …m with bc…"}),
        ("none", {"no salt, then 'None'"}),
        ("empty", {"an empty salt"}),
    ],
)
def test_each_way_of_confusing_tenants_is_found_by_its_own_check(
    fault: str, checks: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A salt that is spelled like something else once shared its pages."""
    with fake_server(fault) as url:
        status, report = audit(url, capsys, "--rounds", "8")
    assert failed(report) == checks
    assert status == 1


def test_without_reuse_the_times_prove_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server("off") as url:
        _, report = audit(url, capsys)
    assert failed(report) == {"the same salt", "no salt twice", "the same salt beyond ASCII"}
    assert report["time under the same salt"][0] == "INCONCLUSIVE"
    assert report["time under another salt"][0] == "INCONCLUSIVE"


def test_a_server_that_reports_no_reuse_is_inconclusive_and_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server("silent") as url:
        status, report = audit(url, capsys, "--rounds", "8")
    assert report["the same salt"] == (
        "INCONCLUSIVE",
        "answers have no cached_tokens in their usage",
    )
    assert status == 1


def test_the_report_for_people_has_a_line_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as url:
        assert main(["cache", "audit", "--url", url, "--rounds", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("auditing http://127.0.0.1")
    assert lines[-1] == f"{len(lines) - 2} of {len(lines) - 2} checks passed"
    assert all(line.startswith("PASS  ") for line in lines[1:-1])
    assert "could have been seen" in lines[-3]


def test_a_server_that_is_not_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "audit", "--url", "http://127.0.0.1:9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no answer from http://127.0.0.1:9" in line


def _verdicts(cold: list[float], warm: list[float], cross: list[float]) -> list[str]:
    return [finding.verdict for finding in check_times(Times(cold=cold, warm=warm, cross=cross))]


SPREAD = [n / 1000 for n in range(12)]


def test_verdicts_on_times() -> None:
    slow, fast = [0.1 + n for n in SPREAD], [0.01 + n for n in SPREAD]
    noisy = [0.1 + 30 * (n - SPREAD[-1] / 2) for n in SPREAD]
    assert _verdicts(slow, fast, slow) == ["PASS", "PASS"]
    assert _verdicts(slow, fast, fast) == ["PASS", "FAIL"]
    assert _verdicts(slow, slow, slow) == ["INCONCLUSIVE", "INCONCLUSIVE"]
    # A difference in the other direction tells just as much.
    assert _verdicts(slow, fast, [0.3 + n for n in SPREAD]) == ["PASS", "FAIL"]
    # Half of the gain is still a leak, and seen.
    assert _verdicts(slow, fast, [0.06 + n for n in SPREAD]) == ["PASS", "FAIL"]
    assert _verdicts(noisy, fast, noisy) == ["INCONCLUSIVE", "INCONCLUSIVE"]


@pytest.mark.slow
def test_a_real_server_keeps_salts_apart(
    tiny_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = audit(tiny_server.url, capsys, "--rounds", "20", "--prompt-tokens", "2048")
    timed = {check for check in report if check.startswith("time")}
    apart = {check: found for check, found in report.items() if check not in timed}
    assert {verdict for verdict, _ in apart.values()} == {"PASS"}, apart
    # How sharp the times are depends on what else the machine does; they may never tell tenants.
    assert not failed(report), report
