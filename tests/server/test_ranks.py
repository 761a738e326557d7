"""A server whose model is dealt out over two processes."""

import psutil
import pytest

from tests.server.processes import (
    EMOJI_TEXT,
    ServerProcess,
    StartServer,
    TinyModel,
    call,
    user,
    wait_until,
)

pytestmark = pytest.mark.slow


def rank_of(server: ServerProcess) -> psutil.Process:
    (rank,) = server.child("engine_process").children()
    assert "mstar.models.parallel.rank" in rank.cmdline()
    return rank


def asked(server: ServerProcess) -> str | None:
    with server.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=user("A"), temperature=0)
    return answer.choices[0].message.content


def test_two_ranks_answer_and_a_killed_one_takes_the_engine_along_until_both_are_back(
    start_server: StartServer,
) -> None:
    server = start_server("--tensor-parallel-size", "2").wait_ready()
    assert asked(server) == EMOJI_TEXT
    rank = rank_of(server)
    engine = server.child("engine_process")
    rank.kill()
    assert psutil.wait_procs([engine], timeout=10)[1] == []
    wait_until(lambda: call(server, "GET", "/ready")[0] != 200)
    wait_until(lambda: call(server, "GET", "/ready")[0] == 200, seconds=60)
    assert rank_of(server).pid != rank.pid
    assert asked(server) == EMOJI_TEXT
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert server.end() == 0, server.log
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert "the engine ends: rank 1 has ended with status -9" in server.log


def test_engine_that_cannot_tell_that_a_rank_is_gone_is_ended(start_server: StartServer) -> None:
    server = start_server("--tensor-parallel-size", "2").wait_ready()
    rank, engine = rank_of(server), server.child("engine_process")
    # As a thread does that waits for a GPU and lets no other run.
    engine.suspend()
    rank.kill()
    assert psutil.wait_procs([engine], timeout=20)[1] == []
    wait_until(lambda: call(server, "GET", "/ready")[0] != 200)
    wait_until(lambda: call(server, "GET", "/ready")[0] == 200, seconds=60)
    assert asked(server) == EMOJI_TEXT
    assert server.end() == 0, server.log


def test_size_that_does_not_fit_the_model_ends_with_one_clear_line(tiny: TinyModel) -> None:
    server = ServerProcess(tiny.folder, "--tensor-parallel-size", "3")
    try:
        assert server.process.wait(timeout=60) == 2
    finally:
        server.close()
    assert "the model has 2 key heads, which cannot be dealt out evenly" in server.log
    assert "Traceback" not in server.log
