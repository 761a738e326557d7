"""The routes about reuse: what keys commit to, why a prompt matches as it does, and the reset."""

from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response

from mstar.engine.resources.kv.explain import ReuseReport
from mstar.engine.root import RootConstants
from mstar.preprocess.explain import from_report
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.bodies import json_answer, read_body
from mstar.server.bridge import Bridge
from mstar.server.failures import ApiError, clip
from mstar.transport.messages import EngineFacts


def add_cache_routes(app: FastAPI, bridge: Bridge, tokenizer: Callable[[], TextTokenizer]) -> None:
    """Add the routes to ``app``.

    Args:
        app: Where they go.
        bridge: To the processes.
        tokenizer: Gives the model's tokenizer; called once the server is ready.
    """

    def text_of(token_ids: Sequence[int]) -> str:
        return tokenizer().decode(token_ids, skip_special_tokens=False)

    def explained(report: ReuseReport) -> Response:
        return json_answer(from_report(report, text_of))

    @app.get("/v1/cache/root", response_model=None)
    async def root() -> Response:
        facts = _facts(bridge)
        named = RootConstants(constants=facts.root_constants, missing=tuple(facts.root_missing))
        return json_answer(named.report())

    @app.post("/v1/cache/explain", response_model=None)
    async def explain(request: Request) -> Response:
        body = await read_body(request, bridge.config.max_body_nbytes)
        return explained(await bridge.explain(body))

    @app.get("/v1/cache/explain/{answer_id}", response_model=None)
    async def explain_answer(answer_id: str) -> Response:
        report = await bridge.explain_request(answer_id)
        if report is None:
            message = (
                f"nothing is known of the answer {clip(answer_id, 100)!r}; give the id of one of "
                "the requests that run or ended lately, from an engine that was not restarted since"
            )
            raise ApiError(404, message, code="answer_not_found", param="answer_id")
        return explained(report)

    # The second is where load generators look for it.
    @app.post("/v1/cache/reset", response_model=None)
    @app.post("/reset_prefix_cache", response_model=None)
    async def reset() -> Response:
        return json_answer({"num_pages": await bridge.reset_cache()})

    @app.get("/kv_event_sources", response_model=None)
    async def event_sources() -> Response:
        return json_answer(_facts(bridge).event_sources)


def _facts(bridge: Bridge) -> EngineFacts:
    facts = bridge.link.facts
    if facts is None:
        state = bridge.readiness()
        raise ApiError(503, state.reason, code=state.code, retry_after=1)
    return facts
