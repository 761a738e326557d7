"""A server that answers as ours does and keeps its prefix cache in one of several bad ways."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = 16
COLD_SECONDS, WARM_SECONDS = 0.05, 0.001


class FakeCache:
    """What has been seen, and how it is told.

    Args:
        fault: ``""`` keeps salts apart; ``ignores`` takes all salts as one; ``timing`` reports
            nothing and answers faster; ``joins`` puts salt and text together without a border;
            ``none`` takes no salt as the salt ``None``; ``off`` reuses nothing; ``silent`` says
            nothing about reuse; ``empty`` takes an empty salt as none; ``knows`` is right, and
            answers the routes about the cache; ``sees`` is right, and takes pictures, ``peeks``
            answers them faster that anybody has sent, ``mixes`` reuses them.
    """

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.seen: set[str] = set()
        self.lock = threading.Lock()

    def name(self, salt: str | None, text: str) -> str:
        """Return what a text is remembered by."""
        if self.fault == "joins":
            return f"{salt or ''}{text}"
        if self.fault == "none":
            return f"{salt}|{text}"
        return json.dumps([salt, text])

    def ask(self, salt: str | None, text: str) -> tuple[int | None, float]:
        """Return the cached tokens to report, and how long the answer takes."""
        if self.fault == "empty":
            salt = salt or None
        is_picture = text.startswith("[")
        is_shared = self.fault == "ignores" or (self.fault == "mixes" and is_picture)
        key = self.name(None if is_shared else salt, text)
        anyone = json.dumps(["anyone", text])
        with self.lock:
            is_known = key in self.seen and self.fault != "off"
            is_known_to_anyone = anyone in self.seen
            self.seen |= {key, anyone}
        leaks = self.fault == "timing" or (self.fault == "peeks" and is_picture)
        is_fast = is_known_to_anyone if leaks else is_known
        cached = len(text) // PAGE * PAGE if is_known else 0
        return None if self.fault == "silent" else cached, (
            WARM_SECONDS if is_fast else COLD_SECONDS
        )


class _Handler(BaseHTTPRequestHandler):
    cache: FakeCache

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            sees = self.cache.fault in ("sees", "peeks", "mixes")
            modalities = ["text", "image"] if sees else ["text"]
            about = {"architecture": {"input_modalities": modalities}}
            self._json(200, {"data": [{"id": "fake", "max_model_len": 4096, **about}]})
        elif self.path == "/v1/cache/root" and self.cache.fault == "knows":
            self._json(200, {"root": "ab", "constants": {"page_size": "16"}, "missing": []})
        else:
            self._missing()

    def _missing(self) -> None:
        self._json(404, {"error": {"message": f"there is no route {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/cache/explain":
            self._explain(body)
            return
        salt = body.get("cache_salt")
        if salt == "" and self.cache.fault != "empty":
            self._json(400, {"error": {"message": "cache_salt must not be empty"}})
            return
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        is_picture = isinstance(text, list)
        cached, seconds = self.cache.ask(salt, json.dumps(text) if is_picture else text)
        usage: dict[str, Any] = {"prompt_tokens": len(text)}
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        # Only what is measured takes its time.
        is_stream = bool(body.get("stream"))
        if is_stream and ("prompt" in body or is_picture):
            time.sleep(seconds)
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        if not is_stream:
            self._json(200, {"choices": [choice], "usage": usage})
            return
        chunks = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._send(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _explain(self, body: dict[str, Any]) -> None:
        if self.cache.fault != "knows":
            self._missing()
            return
        answer = {
            "num_prompt_tokens": len(body["prompt"]),
            "num_matched_tokens": PAGE,
            "by_tier": {"device": PAGE, "host": 0, "disk": 0},
            "pages": 1,
            "page_size": PAGE,
            "num_common_tokens": PAGE,
            "stopped": {"page": 1, "slot": PAGE, "reason": "never_seen"},
        }
        self._json(200, answer)

    def _json(self, status: int, body: object) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def fake_server(fault: str = "") -> Iterator[str]:
    """Run a server in this process and give its URL."""
    handler = type("Handler", (_Handler,), {"cache": FakeCache(fault)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
