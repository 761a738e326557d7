"""Short steps that are padded and cut at attention give what they give as they are.

The recorder is the engine's own; replaced is what a device records: a step computes anew.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from mstar.engine.capture import Recorder, SelectingNode
from mstar.engine.engine import EngineCore
from mstar.engine.output import TokenLogprobs
from mstar.engine.pieces import Pieces, Place, piece_sizes, place_of
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.attention.base import AttentionPlan
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.mirror import Fence
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.step import NodeStep
from mstar.models.decoder import DecoderModel

CPU = torch.device("cpu")
NUMBERS = Deployment(
    num_pages=60, page_size=4, max_num_seqs=4, max_model_len=96, max_num_batched_tokens=24
)


class Padded(AttentionPlan):
    """Attention of a step's own rows among those of a recording."""

    def __init__(self, plan: AttentionPlan, num_tokens: int, rows: npt.NDArray[np.int64]) -> None:
        self._plan = plan
        self._num_tokens = num_tokens
        self._rows = rows

    def run(self, layer: int, query: Tensor) -> Tensor:
        # What was attended to by steps before must not matter.
        attended = torch.full_like(query, 7.0)
        attended[: self._num_tokens] = self._plan.run(layer, query[: self._num_tokens].contiguous())
        return attended

    def of_last(self, rows: npt.NDArray[np.int64]) -> AttentionPlan:
        assert not len(rows), "a recording knows nothing of the step"
        return Padded(self._plan.of_last(self._rows), len(self._rows), self._rows)


class CpuPieces(Pieces):
    """Computes the step that was filled in."""

    plans: Mapping[str, Any]

    def __init__(self, size: int, num_rows: int, node: SelectingNode) -> None:
        super().__init__(size, num_rows, CPU)
        self._node = node

    def run(self, attention: AttentionPlan, num_tokens: int, rows: npt.NDArray[np.int64]) -> Tensor:
        plans = {
            **self.plans,
            "kv": replace(self.plans["kv"], slots=self._slots),
            "attention": Padded(attention, num_tokens, rows),
        }
        return self._node.compute_rows(self._ids.tensor, plans, self._rows.tensor)


class CpuRecorder(Recorder):
    """A recorder without recorded decode steps."""

    def use(self, sizes: list[int], num_rows: int) -> None:
        assert self._has_pieces()
        self._place = Place("kv", "attention")
        assert isinstance(self._node, SelectingNode)
        for size in sorted(sizes):
            self._pieces[size] = CpuPieces(size, num_rows, self._node)

    def _plan_pieces(self, size: int, step: NodeStep) -> dict[str, Any]:
        plans = super()._plan_pieces(size, step)
        assert place_of(plans) == self._place
        pieces = self._pieces[size]
        assert isinstance(pieces, CpuPieces)
        pieces.plans = plans
        return plans


def engine(model: DecoderModel, sizes: list[int], num_rows: int = 4) -> tuple[EngineCore, Recorder]:
    core = EngineCore(model, NUMBERS)
    ((name, node),) = model.nodes.items()
    assert isinstance(node, SelectingNode)
    recorder = CpuRecorder(name, node, core._runner.resources, CPU, Fence(CPU))
    recorder.use(sizes, num_rows)
    core._runner._recorders[name] = recorder
    return core, recorder


def answers(core: EngineCore, turn: str) -> dict[str, list[TokenLogprobs]]:
    """Prompts that are cut, mixed with tokens that are generated, and reused."""
    told: dict[str, list[TokenLogprobs]] = {}
    root = core.root
    assert root is not None
    for place, length in enumerate((3, 30, 1, 17, 45, 9)):
        ids = [(i * 7 + i * i) % 150 for i in range(length)]
        keys = chain([ids[i : i + 4] for i in range(0, length, 4)], None, root)
        core.add_request(
            PreparedRequest(
                request_id=f"{turn}{place}",
                token_ids=ids,
                params=SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=3),
                root=root,
                page_keys=list(keys),
            )
        )
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            told.setdefault(output.request_id, []).extend(output.logprobs or [])
        core.check()
    return told


@pytest.mark.parametrize("sizes", [[24], [4, 8, 16], [2, 5, 24]])
def test_steps_of_any_length_give_the_same_tokens(toy: DecoderModel, sizes: list[int]) -> None:
    plain = EngineCore(toy, NUMBERS)
    core, recorder = engine(toy, sizes)
    for turn in ("cold", "warm"):
        expected, found = answers(plain, turn), answers(core, turn)
        assert found.keys() == expected.keys()
        for name, own in expected.items():
            assert [e.token_id for e in found[name]] == [e.token_id for e in own]
            for entry, known in zip(found[name], own, strict=True):
                assert entry.logprob == pytest.approx(known.logprob, abs=1e-4)
    assert recorder.num_pieced
    assert core.stats() == plain.stats()


def test_step_with_more_answers_than_rows_runs_as_it_is(toy: DecoderModel) -> None:
    core, recorder = engine(toy, [24], num_rows=1)
    for place in range(2):
        params = SamplingParams(max_tokens=1, temperature=0.0)
        core.add_request(PreparedRequest(request_id=str(place), token_ids=[1, 2, 3], params=params))
    assert len(core.step()) == 2
    assert recorder.num_pieced == 0
    params = SamplingParams(max_tokens=1, temperature=0.0)
    core.add_request(PreparedRequest(request_id="alone", token_ids=[1, 2, 3], params=params))
    assert len(core.step()) == 1
    assert recorder.num_pieced == 1


@pytest.mark.parametrize(
    ("budget", "ranks", "sizes"),
    [(8192, 1, 6), (512, 1, 6), (511, 1, 5), (16, 1, 1), (15, 1, 0), (8192, 2, 10), (1024, 4, 8)],
)
def test_sizes_fit_the_budget(budget: int, ranks: int, sizes: int) -> None:
    found = piece_sizes(budget, ranks)
    assert len(found) == sizes
    assert found == sorted(found, reverse=True)
    assert all(size <= budget for size in found)
