"""Walks of composite models through a whole engine: visits, streaming edges, legs, companions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.engine.batch import Node
from mstar.engine.chunks import Sentences, Sized
from mstar.engine.engine import EngineCore
from mstar.engine.graph import Cursor, Edge, ForEach, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.engine.model import Leg, Model
from mstar.engine.output import Emitted, RequestOutput
from mstar.engine.request import (
    Component,
    PreparedRequest,
    Request,
)
from mstar.engine.resources.base import Deployment
from mstar.models.composite import Scope
from mstar.models.decoder import DecoderModel, DecoderNode
from mstar.models.toy import toy_model
from mstar.preprocess.items import array_of
from tests.engine.toys import (
    GREEDY,
    Guided,
    Visited,
    decoder_of,
    guided_model,
    guiding,
    keyed,
    listener,
    listening,
)


class Visits(Model):
    """A model of visits only."""

    name = "visits"
    vocab_size = 0
    max_model_len = 8
    stop_token_ids = frozenset[int]()
    root_constants = None
    specs = ()

    def __init__(self, nodes: Mapping[str, Node], walk: Walk, edges: tuple[Edge, ...] = ()) -> None:
        self.nodes = nodes
        self.graph = Graph(tuple(nodes), (("walk", walk),), edges, tuple(walk.predicates()))
        self.forgotten: list[str] = []

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        return self.graph.cursor("walk")

    def next_walk(self, request: Request) -> Cursor | None:
        return None

    def holds(self, predicate: str, request: Request) -> bool:
        return len(request.prepared.options.get("rounds", [])) >= 3

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def engine_of(model: Model, **numbers: Any) -> EngineCore:
    defaults: dict[str, Any] = {"max_num_seqs": 8, "num_pages": 64, "page_size": 4}
    return EngineCore(model, Deployment(**(defaults | {"max_model_len": 64} | numbers)))


def visit(name: str, **options: Any) -> PreparedRequest:
    return PreparedRequest(request_id=name, token_ids=[], params=GREEDY, options=options)


def finish(engine: EngineCore, limit: int = 500) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(limit):
        if not engine.has_work:
            engine.check()
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
    raise AssertionError(f"the engine still has work after {limit} steps")


def test_a_request_without_tokens_visits_its_nodes_in_order_and_ends_once() -> None:
    order: list[str] = []

    def noting(name: str) -> Visited:
        def act(request: Request, chunk: object) -> Sequence[Emitted]:
            order.append(name)
            return ()

        return Visited(act)

    nodes = {name: noting(name) for name in "abc"}
    walk = Sequential(Run("a"), Loop(Run("b"), times=3), Run("c"))
    model = Visits(nodes, walk)
    engine = engine_of(model)
    engine.add_request(visit("r"))
    (output,) = finish(engine)["r"]
    assert order == ["a", "b", "b", "b", "c"]
    assert (output.finish_reason, output.token_ids, output.emitted) == ("stop", [], [])
    assert model.forgotten == ["r"]


def test_a_loop_of_visits_ends_when_its_predicate_holds() -> None:
    def act(request: Request, chunk: object) -> Sequence[Emitted]:
        request.prepared.options["rounds"].append(1)
        return ()

    node = Visited(act)
    engine = engine_of(Visits({"a": node}, Loop(Run("a"), until="enough")))
    engine.add_request(visit("r", rounds=[]))
    finish(engine)
    assert len(node.batches) == 3


def test_visits_of_one_shape_share_batches_up_to_the_nodes_bound() -> None:
    node = Visited(max_batch=3, shape=lambda request, part: request.prepared.options["size"])
    engine = engine_of(Visits({"a": node}, Run("a")))
    for number in range(8):
        engine.add_request(visit(str(number), size=number % 2))
    ended = finish(engine)
    assert ended.keys() == set("01234567")
    assert sorted(map(len, node.batches), reverse=True)[:2] == [3, 3]
    for batch in node.batches:
        assert len(batch) <= 3
        assert len({int(name) % 2 for name in batch}) == 1


def test_a_visit_that_fails_hurts_no_other_of_its_batch() -> None:
    def act(request: Request, chunk: object) -> Sequence[Emitted]:
        if request.request_id == "bad":
            raise ValueError("this one cannot be done")
        return [Emitted(name="result", text=request.request_id)]

    model = Visits({"a": Visited(act)}, Run("a"))
    engine = engine_of(model)
    for name in ("good", "bad", "fine"):
        engine.add_request(visit(name))
    ended = finish(engine)
    assert ended["bad"][-1].error is not None
    assert "this one cannot be done" in ended["bad"][-1].error.message
    for name in ("good", "fine"):
        assert [piece.text for piece in ended[name][0].emitted] == [name]
        assert ended[name][-1].finish_reason == "stop"
    assert sorted(model.forgotten) == ["bad", "fine", "good"]


def streaming(texts: Sequence[str], **bounds: Any) -> tuple[Visits, list[str]]:
    """Return a model whose teller says one text a round, and whose speaker says each sentence."""
    log: list[str] = []

    def tell(request: Request, chunk: object) -> Sequence[Emitted]:
        rounds = request.prepared.options["rounds"]
        rounds.append(1)
        log.append(f"{request.request_id} tells {len(rounds)}")
        return [Emitted(name="sentences", text=texts[len(rounds) - 1])]

    def speak(request: Request, chunk: object) -> Sequence[Emitted]:
        log.append(f"{request.request_id} speaks {chunk}")
        return [Emitted(name="speech", text=str(chunk).strip())]

    walk = Parallel(Loop(Run("teller"), until="enough"), ForEach(Run("speaker"), "sentences"))
    edge = Edge("teller", "speaker", "sentences", Sentences(**bounds))
    nodes = {"teller": Visited(tell), "speaker": Visited(speak)}
    return Visits(nodes, walk, (edge,)), log


def test_a_consumer_starts_on_the_first_chunk_while_its_producer_goes_on() -> None:
    model, log = streaming(["The first one is said. Then ", "comes more ", "and an end"])
    engine = engine_of(model)
    engine.add_request(visit("r", rounds=[]))
    outputs = finish(engine)["r"]
    spoken = [piece.text for output in outputs for piece in output.emitted]
    assert spoken == ["The first one is said.", "Then comes more and an end"]
    assert log.index("r speaks The first one is said. ") < log.index("r tells 3")
    assert [output.finish_reason for output in outputs] == [None, "stop"]


def test_a_producer_that_says_nothing_lets_its_consumer_end_unvisited() -> None:
    model, log = streaming(["", "", ""])
    engine = engine_of(model)
    engine.add_request(visit("r", rounds=[]))
    (output,) = finish(engine)["r"]
    assert (output.emitted, output.finish_reason) == ([], "stop")
    assert not [line for line in log if "speaks" in line]


def test_producers_and_consumers_of_many_requests_take_turns() -> None:
    sentence = "This is a sentence of some length. "
    model, log = streaming([sentence * 4, sentence, sentence])
    engine = engine_of(model)
    for name in "abc":
        engine.add_request(visit(name, rounds=[]))
    ended = finish(engine)
    for name in "abc":
        spoken = [piece.text for output in ended[name] for piece in output.emitted]
        assert spoken == [sentence.strip()] * 6
    kinds = ["tells" if "tells" in line else "speaks" for line in log]
    # Three requests a batch, and no node runs twice while the other is waited for.
    assert kinds[:9] == ["tells"] * 3 + ["speaks"] * 3 + ["tells"] * 3
    speaker = model.nodes["speaker"]
    assert isinstance(speaker, Visited)
    assert all(len(batch) == 3 for batch in speaker.batches)


def test_arrays_over_an_edge_come_in_chunks_of_its_size() -> None:
    seen: list[list[int]] = []

    def make(request: Request, chunk: object) -> Sequence[Emitted]:
        rounds = request.prepared.options["rounds"]
        rounds.append(1)
        ids = torch.arange(5).numpy() + 5 * (len(rounds) - 1)
        return [Emitted(name="codes", array=array_of(ids))]

    def take(request: Request, chunk: Any) -> Sequence[Emitted]:
        seen.append(chunk.tolist())
        return ()

    walk = Parallel(Loop(Run("maker"), until="enough"), ForEach(Run("taker"), "codes"))
    edge = Edge("maker", "taker", "codes", Sized(6, first=2))
    engine = engine_of(Visits({"maker": Visited(make), "taker": Visited(take)}, walk, (edge,)))
    engine.add_request(visit("r", rounds=[]))
    finish(engine)
    assert seen == [[0, 1], [2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]


def test_an_abort_in_the_middle_of_a_stream_leaves_nothing_behind() -> None:
    model, _ = streaming(["One sentence is here. Two", " more. ", "Three."])
    engine = engine_of(model)
    for name in "ab":
        engine.add_request(visit(name, rounds=[]))
    engine.step()
    assert engine.abort("a")
    ended = finish(engine)
    assert ended.keys() == {"b"}
    assert sorted(model.forgotten) == ["a", "b"]


# Legs.


class Relay(Model):
    """Two decoders in turn: the second is asked what the first one answered, with a word before."""

    name = "relay"

    def __init__(self) -> None:
        first, second = toy_model(1), toy_model(2)
        self.parts = {"first": first, "second": second}
        self.nodes = {}
        self.specs = []
        walks: list[tuple[str, Walk]] = []
        self.components: dict[str, Component] = {}
        for name, part in self.parts.items():
            scope = Scope(name)
            specs = scope.specs(part)
            self.nodes |= scope.nodes(part)
            self.specs += specs
            walks += scope.walks(part)
            own = scope.component(part.component_of("prefill"), specs)
            self.components[name] = replace(own, is_silent=name == "first")
        self.graph = Graph(
            tuple(self.nodes), tuple(walks), (), ("first.finished", "second.finished")
        )
        self.vocab_size = first.vocab_size
        self.max_model_len = first.max_model_len
        self.stop_token_ids = first.stop_token_ids
        self.root_constants = {"weights": "the toys 1 and 2"}

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        return self.graph.cursor("first.prefill")

    def next_walk(self, request: Request) -> Cursor | Leg | None:
        part = request.cursor.name.partition(".")[0]
        if request.cursor.local_name == "prefill" and request.finish_reason is None:
            return self.graph.cursor(f"{part}.decode")
        if part == "second":
            return None
        heard = list(request.generated())
        leg = keyed(request.request_id, [7, *heard], request.prepared.root)
        return Leg(leg, "second.prefill", (Emitted(name="heard", info={"ids": heard}),))

    def component_of(self, walk: str) -> Component:
        return self.components[walk.partition(".")[0]]

    def holds(self, predicate: str, request: Request) -> bool:
        return request.finish_reason is not None


def answer(seed: int, ids: list[int]) -> list[int]:
    engine = engine_of(toy_model(seed))
    engine.add_request(keyed("r", ids, None))
    return [token for output in finish(engine)["r"] for token in output.token_ids]


PROMPTS = {"a": [5, 6, 7, 8, 9, 10], "b": [11, 12], "c": [5, 6, 7, 8, 9, 20, 21, 22, 23]}


@pytest.mark.parametrize("num_pages", [64, 9])
def test_legs_give_what_each_component_gives_alone(num_pages: int) -> None:
    engine = engine_of(Relay(), num_pages=num_pages, max_model_len=24)
    for name, ids in PROMPTS.items():
        engine.add_request(keyed(name, ids, engine.root))
    ended = finish(engine)
    for name, ids in PROMPTS.items():
        heard = answer(1, ids)
        outputs = ended[name]
        assert [e.info["ids"] for o in outputs for e in o.emitted] == [heard]
        assert [t for o in outputs for t in o.token_ids] == answer(2, [7, *heard])
        assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == "length"
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
    assert num_pages > 9 or stats.num_preemptions > 0


def test_each_leg_reuses_what_its_own_component_computed() -> None:
    engine = engine_of(Relay())
    ids = list(range(5, 18))
    for turn in range(2):
        engine.add_request(keyed("r", ids, engine.root))
        outputs = finish(engine)["r"]
        cached = [output.num_cached_tokens for output in outputs]
        # The first output is the end of the first leg, the others are the second's.
        assert cached[1:] == [4 * ((1 + 8 - 1) // 4) if turn else 0] * (len(cached) - 1)
    assert engine.stats().cached_tokens == 12 + 8


def test_a_leg_that_cannot_be_served_ends_its_request_with_the_reason() -> None:
    model = Relay()
    model.components["second"] = replace(model.components["second"], max_model_len=12)
    engine = engine_of(model)
    engine.add_request(keyed("r", [5, 6, 7], engine.root))
    last = finish(engine)["r"][-1]
    assert last.finish_reason == "error"
    assert last.error is not None
    assert "9 prompt tokens and max_tokens=8 exceed the context of 12" in last.error.message
    assert last.emitted, "what the first leg gave is told all the same"
    assert engine.stats().num_pages_used == 0


# Items beside the stream.


def test_what_is_beside_a_stream_is_encoded_once_and_never_mixed_up() -> None:
    ids = list(range(5, 18))
    alone = {}
    for sound in (1, 2):
        engine = engine_of(listener()[0])
        engine.add_request(listening("r", ids, sound, None))
        alone[sound] = [t for o in finish(engine)["r"] for t in o.token_ids]
    assert alone[1] != alone[2]
    model, encoder = listener()
    engine = engine_of(model, max_num_batched_tokens=8, encoder_cache_tokens=24)
    for turn in range(2):
        for name, sound in (("a", 1), ("b", 2), ("c", 1)):
            engine.add_request(listening(name, ids, sound, engine.root))
        ended = finish(engine)
        for name, sound in (("a", 1), ("b", 2), ("c", 1)):
            assert [t for o in ended[name] for t in o.token_ids] == alone[sound], (turn, name)
    assert encoder.num_encoded == 2
    # Twice each of two streams, but for the first time of each sound.
    assert engine.stats().cached_tokens == 4 * 12


def test_what_is_beside_a_stream_stays_while_the_stream_runs() -> None:
    model, encoder = listener()
    # Room for the output of one sound: the second request waits for the first to end.
    engine = engine_of(model, encoder_cache_tokens=6, max_num_batched_tokens=16)
    for name, sound in (("a", 1), ("b", 2), ("c", 3)):
        engine.add_request(listening(name, [5, 6, 7], sound, engine.root))
    ended = finish(engine)
    assert {name: len(outputs) for name, outputs in ended.items()} == dict.fromkeys("abc", 8)
    assert all(outputs[-1].finish_reason == "length" for outputs in ended.values())
    assert encoder.num_encoded == 3


# Companions.


GUIDED = {
    "a": ([5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 0, 0, 0, 0, 0, 0, 0, 13]),
    "b": ([5, 40, 41, 42, 43], [5, 0, 0, 0, 43]),
    "c": ([5, 6, 7, 8, 9, 10, 11, 12, 60, 61, 62], [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 62]),
}


def guided_answer(ids: list[int], other: list[int]) -> list[int]:
    """Return the greedy answer by two streams computed anew, whole, for every token."""
    engine = engine_of(toy_model(4))
    (name,) = engine.model.nodes
    node = engine.model.nodes[name]
    assert isinstance(node, DecoderNode)
    found: list[int] = []
    for _ in range(8):
        logits = []
        for stream in (ids, other):
            seen: list[Tensor] = []
            recorded = engine_of(spied(seen))
            recorded.add_request(keyed("r", [*stream, *found], None))
            recorded.step()
            logits.append(seen[0][-1])
        main, beside = logits
        found.append(int((beside + Guided.scale * (main - beside)).argmax()))
    return found


def spied(seen: list[Tensor]) -> DecoderModel:
    class Spy(DecoderNode):
        def logits(self, hidden: Tensor) -> Tensor:
            found = super().logits(hidden)
            seen.append(found)
            return found

    return decoder_of(4, "spied", Spy)


@pytest.mark.parametrize(
    "numbers",
    [{}, {"max_num_batched_tokens": 4}, {"num_pages": 13, "max_model_len": 20}],
    ids=["roomy", "chunked", "preempting"],
)
def test_two_streams_of_each_request_run_in_one_forward(numbers: dict[str, Any]) -> None:
    expected = {name: guided_answer(*pair) for name, pair in GUIDED.items()}
    assert expected["a"] != answer(4, GUIDED["a"][0])
    engine = engine_of(guided_model(), **numbers)
    for turn in range(2):
        for name, pair in GUIDED.items():
            engine.add_request(guiding(name, *pair, engine.root))
        ended = finish(engine)
        for name, tokens in expected.items():
            assert [t for o in ended[name] for t in o.token_ids] == tokens, (turn, name)
        counted = Counter({name: outputs[0].num_cached_tokens for name, outputs in ended.items()})
        if turn and not numbers:
            assert counted == {"a": 8, "b": 4, "c": 8}
    stats = engine.stats()
    assert stats.num_pages_used == 0
    assert "num_pages" not in numbers or stats.num_preemptions > 0
