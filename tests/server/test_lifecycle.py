"""What a server does when processes start, stall, die and end, with real processes and signals."""

import http.client
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.server.processes import (
    EMOJI_TEXT,
    Answer,
    ServerProcess,
    StartServer,
    TinyModel,
    call,
    connect,
    error_of,
    user,
    wait_until,
)

CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.slow
KEY = {"authorization": "Bearer sesame"}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough for socket files."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def ready_code(server: ServerProcess) -> str:
    answer = call(server, "GET", "/ready")
    return "ready" if answer[0] == 200 else str(error_of(answer)[1]["code"])


def opened(
    server: ServerProcess, fields: dict[str, Any]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Return a streaming request whose first event is here."""
    connection = connect(server)
    body = {"messages": user("3"), "temperature": 0, "stream": True} | fields
    headers = {"content-type": "application/json"} | KEY
    connection.request("POST", CHAT, json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert response.readline().startswith(b"data: ")
    return connection, response


def events(data: bytes) -> list[Any]:
    """Return the JSON of a stream's events; the last one must be the end mark."""
    lines = [line for line in data.decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_two_hundred_requests_at_once_on_a_pool_for_three_then_a_drain(
    start_server: StartServer, short_folder: Path
) -> None:
    server = start_server(
        *("--num-pages", "24", "--max-model-len", "384", "--shutdown-timeout", "60"),
        folder=short_folder,
    ).wait_ready()
    barrier = threading.Barrier(200, timeout=60)

    def ask(index: int) -> Answer:
        # 116 tokens in and 12 out are 8 pages of 16; no two prompts share a page.
        text = f"{index:03d}".ljust(109, "x") + "3"
        barrier.wait()
        body = {"messages": user(text), "max_tokens": 12, "temperature": 0}
        return call(server, "POST", CHAT, body)

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    assert {answer[0] for answer in answers} == {200}
    texts = {json.loads(a[2])["choices"][0]["message"]["content"] for a in answers}
    assert texts == {"456789012345"}

    # SIGTERM under load: what runs or waits is finished, nothing new is begun.
    streams = [opened(server, {"max_tokens": 120}) for _ in range(6)]
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("requests are in flight")
    assert ready_code(server) == "server_draining"
    status, error = error_of(call(server, "POST", CHAT, {"messages": user("A")}))
    assert (status, error["code"]) == (503, "server_draining")
    for connection, response in streams:
        with closing(connection):
            chunks = events(response.read())
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.end() == 0, server.log
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()]
    assert list(short_folder.iterdir()) == []


def test_two_interrupts_end_a_busy_server_at_once(
    start_server: StartServer, short_folder: Path
) -> None:
    server = start_server("--shutdown-timeout", "600", folder=short_folder).wait_ready()
    connection, response = opened(server, {"max_tokens": 4000})
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGINT)
    server.wait_for("requests are in flight")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=15) == 0, server.log
    with closing(connection):
        (*_, last) = events(response.read())
    assert last["error"]["code"] == "server_draining"
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()]
    assert list(short_folder.iterdir()) == []


def test_loading_is_told_and_a_killed_api_process_leaves_no_orphans(
    start_server: StartServer,
) -> None:
    server = start_server().wait_bound()
    wait_until(lambda: _answers(server))
    assert ready_code(server) == "model_loading"
    status, error = error_of(call(server, "POST", CHAT, {"messages": user("A")}))
    assert (status, error["type"]) == (503, "service_unavailable")
    server.wait_ready()
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) == 2
    server.process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def _answers(server: ServerProcess) -> bool:
    try:
        return call(server, "GET", "/health")[0] == 200
    except ConnectionError:
        return False


@pytest.fixture(scope="module")
def guarded(tiny: TinyModel) -> Iterator[ServerProcess]:
    """A server with a key, a short queue and little patience."""
    flags = ("--api-key", "sesame", "--max-num-queued-reqs", "2", "--stall-timeout", "1")
    running = ServerProcess(tiny.folder, *flags)
    try:
        yield running.wait_ready()
    finally:
        status = running.end()
    assert status == 0, running.log


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/v1/none"])
def test_the_key_guards_every_route_but_the_probes(guarded: ServerProcess, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
        status, error = error_of(call(guarded, "GET", path, headers=headers))
        assert (status, error["type"], error["code"]) == (
            401,
            "authentication_error",
            "invalid_api_key",
        )
    assert call(guarded, "GET", path, headers=KEY)[0] in (200, 404)
    assert call(guarded, "GET", "/health")[0] == 200
    assert call(guarded, "GET", "/ready")[0] == 200
    assert "sesame" not in guarded.log


def test_a_stuck_engine_is_told_and_a_full_queue_is_a_429(guarded: ServerProcess) -> None:
    engine = guarded.child("engine_process")
    body = {"messages": user("A"), "temperature": 0}
    with ThreadPoolExecutor(2) as pool:
        engine.suspend()
        try:
            wait_until(lambda: ready_code(guarded) == "engine_stalled")
            waiting = [pool.submit(call, guarded, "POST", CHAT, body, KEY) for _ in range(2)]
            wait_until(lambda: _gauge(guarded, "num_requests_in_flight") == 2)
            answer = call(guarded, "POST", CHAT, body, KEY)
            status, error = error_of(answer)
            assert (status, error["code"]) == (429, "server_busy")
            assert error["type"] == "rate_limit_error"
            assert int(answer[1]["retry-after"]) > 0
            assert call(guarded, "GET", "/health")[0] == 200
        finally:
            engine.resume()
        for future in waiting:
            found = json.loads(future.result(timeout=30)[2])
            assert found["choices"][0]["message"]["content"] == EMOJI_TEXT
    wait_until(lambda: ready_code(guarded) == "ready")


def test_a_killed_engine_fails_its_requests_clearly_and_comes_back(guarded: ServerProcess) -> None:
    engine = guarded.child("engine_process")
    with guarded.client(api_key="sesame") as client, ThreadPoolExecutor(1) as pool:
        stream = client.chat.completions.create(
            model="tiny", messages=user("3"), max_tokens=4000, stream=True, temperature=0
        )
        next(iter(stream))
        connection, raw = opened(guarded, {"max_tokens": 4000})
        whole = pool.submit(
            call, guarded, "POST", CHAT, {"messages": user("3"), "max_tokens": 4000}, KEY
        )
        wait_until(lambda: _gauge(guarded, "num_requests_running") == 3)
        engine.kill()
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        assert caught.value.code == "engine_dead"
        with closing(connection):
            (*_, last) = events(raw.read())
        assert last["error"]["code"] == "engine_dead"
        status, error = error_of(whole.result(timeout=10))
        assert (status, error["code"]) == (503, "engine_dead")
        assert ready_code(guarded) in ("engine_dead", "model_loading")
        wait_until(lambda: ready_code(guarded) == "ready", seconds=60)
        assert guarded.wait_for(r"mstar is ready at (http://\S+)")[1] == guarded.url
        answer = client.chat.completions.create(model="tiny", messages=user("A"), temperature=0)
        assert answer.choices[0].message.content == EMOJI_TEXT
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert guarded.child("engine_process").pid != engine.pid
    assert _gauge(guarded, "num_requests_running") == 0


def _metrics(server: ServerProcess) -> str:
    return call(server, "GET", "/metrics", headers=KEY)[2].decode()


def _gauge(server: ServerProcess, name: str) -> float:
    (line,) = (x for x in _metrics(server).splitlines() if x.startswith(f"mstar:{name}{{"))
    return float(line.rsplit(" ", 1)[1])


def test_a_killed_worker_is_replaced_and_its_job_done_by_the_next(guarded: ServerProcess) -> None:
    worker = guarded.child("worker")
    worker.suspend()
    with ThreadPoolExecutor(1) as pool:
        body = {"messages": user("A"), "temperature": 0}
        answer = pool.submit(call, guarded, "POST", CHAT, body, KEY)
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.3)
        worker.kill()
        found = json.loads(answer.result(timeout=30)[2])
    assert found["choices"][0]["message"]["content"] == EMOJI_TEXT
    assert guarded.child("worker").pid != worker.pid
    wait_until(lambda: ready_code(guarded) == "ready")


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mstar", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_stuck_worker_is_replaced_and_its_job_done_by_the_next(
    start_server: StartServer,
) -> None:
    server = start_server("--preprocess-timeout", "3").wait_ready()
    worker = server.child("worker")
    worker.suspend()
    answer = call(server, "POST", CHAT, {"messages": user("A"), "temperature": 0})
    assert json.loads(answer[2])["choices"][0]["message"]["content"] == EMOJI_TEXT
    assert not worker.is_running()
    assert f"worker {worker.pid} has been at request" in server.log


def test_a_model_that_is_not_there_ends_with_one_clear_line() -> None:
    ended = serve("./no-such-model", "--port", "0", "--log-level", "error")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "no-such-model" in line


def test_broken_weights_end_with_the_reason_and_no_traceback(
    tiny: TinyModel, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny.folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    ended = serve(str(broken), "--port", "0")
    assert ended.returncode == 2, ended.stderr
    assert "cannot start" in ended.stderr
    assert "model.safetensors" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "started again" not in ended.stderr


def test_a_taken_port_ends_with_one_clear_line(tiny: TinyModel) -> None:
    import socket  # noqa: PLC0415

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = serve(str(tiny.folder), "--port", port, "--log-level", "error")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.count(port) == 1
    assert "choose another --port" in line


def test_an_address_that_is_not_here_ends_with_one_clear_line(tiny: TinyModel) -> None:
    ended = serve(str(tiny.folder), "--host", "192.0.2.1", "--port", "0", "--log-level", "error")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "192.0.2.1" in line
    assert "choose another --host" in line
