from typing import Any

import pytest

from mstar.engine.admission import check_layout, max_len
from mstar.engine.array import Array
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.errors import CapacityError, ContextLengthError, RequestError
from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model
from mstar.models.toy_items import KIND, toy_item_model

DIGEST = b"x" * 32
COMPONENT = toy_model().component_of("prefill")
LIMIT = 20
INPUT: dict[str, Array] = {}


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return toy_model(1)


@pytest.fixture(scope="module")
def reader() -> DecoderModel:
    """A model that reads pictures."""
    return toy_item_model()


def prepared(ids: list[int], *, layout: list[Span] | None = None, **params: Any) -> PreparedRequest:
    spans = layout or []
    return PreparedRequest(
        request_id="r",
        token_ids=ids,
        params=SamplingParams(**params),
        spans=spans,
        inputs=[INPUT for span in spans if span.digest is not None],
    )


def test_request_may_fill_its_prompt_and_what_it_asked_for(model: DecoderModel) -> None:
    for num_ids in range(1, LIMIT):
        ids = [5] * num_ids
        assert max_len(prepared(ids, max_tokens=None), COMPONENT, LIMIT) == LIMIT
        for max_tokens in range(1, LIMIT - num_ids + 1):
            found = max_len(prepared(ids, max_tokens=max_tokens), COMPONENT, LIMIT)
            assert found == num_ids + max_tokens


@pytest.mark.parametrize("num_ids", [LIMIT, LIMIT + 1, 3 * LIMIT])
def test_prompt_that_leaves_no_room_for_an_answer_is_refused_with_both_numbers(
    model: DecoderModel, num_ids: int
) -> None:
    for max_tokens in (None, 1):
        with pytest.raises(ContextLengthError) as caught:
            max_len(prepared([5] * num_ids, max_tokens=max_tokens), COMPONENT, LIMIT)
        assert f"the prompt has {num_ids} tokens and the context holds {LIMIT}" in str(caught.value)
        assert "shorten the prompt" in str(caught.value)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize(("num_ids", "max_tokens"), [(LIMIT - 1, 2), (1, LIMIT), (10, 1000)])
def test_answer_that_would_not_fit_is_refused_with_what_would(
    model: DecoderModel, num_ids: int, max_tokens: int
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        max_len(prepared([5] * num_ids, max_tokens=max_tokens), COMPONENT, LIMIT)
    words = str(caught.value)
    assert f"{num_ids} prompt tokens and max_tokens={max_tokens} exceed" in words
    assert f"lower max_tokens to {LIMIT - num_ids}" in words
    assert caught.value.param == "max_tokens"
    # The remedy is one.
    fits = prepared([5] * num_ids, max_tokens=LIMIT - num_ids)
    assert max_len(fits, COMPONENT, LIMIT) == LIMIT


def test_prompt_without_a_token_is_refused(model: DecoderModel) -> None:
    with pytest.raises(RequestError, match="no tokens; give it at least one"):
        max_len(prepared([]), COMPONENT, LIMIT)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("past", [-1, 0, 7])
def test_id_outside_the_vocabulary_is_named(model: DecoderModel, place: int, past: int) -> None:
    size = model.vocab_size
    wrong = -1 if past < 0 else size + past
    ids = [0, size - 1]
    ids.insert(place, wrong)
    with pytest.raises(RequestError, match=f"^token id {wrong} is outside .* of {size}$") as caught:
        max_len(prepared(ids), COMPONENT, LIMIT)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_parameter_that_names_an_id_outside_the_vocabulary_is_named(
    model: DecoderModel, name: str
) -> None:
    size = model.vocab_size

    def asking(token: int) -> PreparedRequest:
        value: Any = {3: 1.0, token: 1.0} if name == "logit_bias" else (3, token)
        return prepared([5], **{name: value, "max_tokens": 4})

    assert max_len(asking(size - 1), COMPONENT, LIMIT) == 5
    with pytest.raises(RequestError, match=f"{name} names token id {size}, outside") as caught:
        max_len(asking(size), COMPONENT, LIMIT)
    assert caught.value.param == name


def test_layout_of_an_item_that_fits_a_step_is_taken(reader: DecoderModel) -> None:
    spans = [Span(1), Span(8, DIGEST, kind=KIND), Span(1)]
    check_layout(prepared([5] * 10, layout=spans), reader, 8)
    check_layout(prepared([5] * 10), reader, 1)


def test_item_larger_than_a_step_is_refused_with_both_numbers(reader: DecoderModel) -> None:
    spans = [Span(1), Span(9, DIGEST, kind=KIND)]
    with pytest.raises(CapacityError) as caught:
        check_layout(prepared([5] * 10, layout=spans), reader, 8)
    assert "an item of 9 slots is encoded in one step, which holds 8 tokens" in str(caught.value)
    assert "raise max_num_batched_tokens" in str(caught.value)


@pytest.mark.parametrize("kind", ["", "sound"])
def test_item_of_an_unknown_kind_is_refused_with_the_kinds_there_are(
    model: DecoderModel, reader: DecoderModel, kind: str
) -> None:
    asking = prepared([5] * 3, layout=[Span(2, DIGEST, kind=kind), Span(1)])
    with pytest.raises(RequestError, match=f"item of kind '{kind}'; .* takes: {KIND}$"):
        check_layout(asking, reader, 8)
    with pytest.raises(RequestError, match=r"takes: none$"):
        check_layout(asking, model, 8)


def test_layout_that_does_not_cover_the_prompt_is_refused(reader: DecoderModel) -> None:
    with pytest.raises(RequestError, match="the layout has 3 slots, the prompt 4"):
        check_layout(prepared([5] * 4, layout=[Span(3)]), reader, 8)
    without_layout = PreparedRequest(
        request_id="r", token_ids=[5], params=SamplingParams(), inputs=[INPUT]
    )
    with pytest.raises(RequestError, match="the layout has 0 slots, the prompt 1"):
        check_layout(without_layout, reader, 8)
