"""Folders of processes, and what killed ones left."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mstar.scratch import ScratchFolder

_SERVER = """
import sys, tempfile
from mstar.scratch import ScratchFolder
tempfile.tempdir = sys.argv[1]
with ScratchFolder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Path:
    place = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_a_folder_goes_with_its_server(place: Path) -> None:
    with ScratchFolder() as folder:
        assert folder.parent == place
        (folder / "0.sock").touch()
    assert not list(place.iterdir())


def test_folders_of_killed_servers_go_and_no_others(place: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        left = Path(server.stdout.readline().strip())
        (left / "0.sock").touch()
        others = [place / name for name in ("mstar-demo-x", "elsewhere", "mstar-link")]
        for folder in others[:2]:
            folder.mkdir()
        (others[1] / "lock").touch()
        others[2].symlink_to(others[1])
        with ScratchFolder() as own:
            assert set(place.iterdir()) == {own, left, *others}
            server.kill()
            server.wait()
            assert (left / "0.sock").exists()
            with ScratchFolder() as next_one:
                assert set(place.iterdir()) == {own, next_one, *others}
    assert set(place.iterdir()) == set(others)


def test_the_last_to_close_clears_what_a_killed_one_left(place: Path) -> None:
    with (
        ScratchFolder(),
        subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        assert Path(server.stdout.readline().strip()).is_dir()
        server.kill()
    assert not list(place.iterdir())


def test_closing_twice_does_nothing_more(place: Path) -> None:
    folder = ScratchFolder()
    folder.close()
    folder.close()
    assert not list(place.iterdir())
