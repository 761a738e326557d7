"""The engine in process, as careless users call it."""

import io
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mstar import Completion, Engine, SamplingParams
from mstar.engine.output import ErrorInfo, RequestOutput
from mstar.engine.resources.base import Deployment
from mstar.errors import MstarError, RequestError
from mstar.preprocess.processors.base import ChatTask, ImageTask, TranscriptionTask
from tests.models import janus_folder
from tests.server.processes import write_tiny_model

CHAT = [{"role": "user", "content": "3"}]
SHORT = SamplingParams(max_tokens=4, temperature=0.0)
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return Engine(folder, deployment=Deployment(num_pages=32, max_model_len=128))


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    stats = shared.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
    shared.core.check()


@pytest.mark.parametrize(
    "ids",
    [
        np.array([18, 19], np.int32),
        torch.tensor([18, 19]),
        [np.int64(18), np.int64(19)],
        (18, 19),
        range(18, 20),
    ],
    ids=["numpy", "torch", "numpy integers", "tuple", "range"],
)
def test_ids_may_come_as_any_sequence_or_array(engine: Engine, ids: Any) -> None:
    (expected,) = engine.generate([18, 19], SHORT)
    calls: list[Any] = [ids, [ids]]
    for prompts in calls:
        (answer,) = engine.generate(prompts, SHORT)
        assert answer.token_ids == expected.token_ids
    with engine.stream(ids, SHORT) as stream:
        assert "".join(stream) == expected.text


def test_texts_and_ids_may_stand_side_by_side_and_no_prompts_give_no_answers(
    engine: Engine,
) -> None:
    prompts: list[str | list[int]] = ["34", engine.tokenizer.encode("34")]
    text, ids = engine.generate(prompts, SHORT)
    assert text.text == ids.text == "5678"
    assert engine.generate([], SHORT) == []


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"hello",
        {"a"},
        iter("ab"),
        "",
        [""],
        [[]],
        [1.5],
        [True],
        [[-1]],
        [[10**9]],
        ["a", 1],
        ["a", None],
        [b"a"],
        [1, "a"],
        np.array([1.5]),
    ],
    # A whole repr may hold an address.
    ids=lambda value: repr(value)[:12],
)
def test_what_is_no_prompt_is_refused_by_name(engine: Engine, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate(prompts, SHORT)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 3, [3], [SHORT, SHORT], []], ids=str)
def test_what_is_no_params_is_refused_by_name(engine: Engine, params: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate("a", params)
    assert caught.value.param == "params"


def test_a_stream_is_of_a_prompt_or_of_messages(engine: Engine) -> None:
    with pytest.raises(RequestError, match="either a prompt or messages"):
        engine.stream()
    with pytest.raises(RequestError, match="either a prompt or messages"):
        engine.stream("3", messages=[{"role": "user", "content": "3"}])


def test_a_stream_that_was_forgotten_runs_no_longer(engine: Engine) -> None:
    for _ in engine.stream("3", LONG):
        break
    assert engine.stats().num_running == 0


def test_a_stream_read_to_its_end_leaves_nothing_behind(engine: Engine) -> None:
    stream = engine.stream("3", SHORT)
    assert "".join(stream) == stream.completion.text == "4567"
    assert not engine._answers
    assert list(stream) == []


def test_a_closed_stream_says_so(engine: Engine) -> None:
    stream = engine.stream("3", LONG)
    next(stream)
    stream.close()
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="was closed before its end"):
        _ = stream.completion


def test_interleaved_streams_and_calls_do_not_disturb_each_other(engine: Engine) -> None:
    expected = [answer.text for answer in engine.generate(["1", "5"], LONG)]
    one, other = engine.stream("1", LONG), engine.stream("5", LONG)
    texts = [next(one), next(other)]
    assert engine.generate("3", SHORT)[0].text == "4567"
    texts[1] += "".join(other)
    texts[0] += "".join(one)
    assert texts == expected


def test_a_request_that_fails_inside_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = engine.generate("5", LONG)
    failing, going = engine.stream("1", LONG), engine.stream("5", LONG)
    text = next(going)
    step = engine.core.step

    def broken_step() -> list[RequestOutput]:
        outputs = step()
        engine.core.abort(failing._request_id)
        failure = RequestOutput(
            request_id=failing._request_id,
            token_ids=[],
            finish_reason="error",
            num_prompt_tokens=1,
            num_cached_tokens=0,
            error=ErrorInfo("it broke", "internal_error"),
        )
        return [failure, *(out for out in outputs if out.request_id != failing._request_id)]

    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "step", broken_step)
        text += next(going)
    text += "".join(going)
    assert text == expected.text
    with pytest.raises(MstarError, match="it broke"):
        list(failing)


def tiered(model: Path, disk: Path, **numbers: Any) -> Engine:
    deployment = Deployment(
        max_model_len=128, disk_cache_bytes=2**24, disk_cache_dir=str(disk), **numbers
    )
    return Engine(str(model), deployment=deployment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


def test_a_closed_engine_has_put_its_pages_on_disk_for_the_next(
    model: Path, tmp_path: Path
) -> None:
    prompt = [18 + number % 10 for number in range(50)]
    with tiered(model, tmp_path, num_pages=32) as engine:
        (cold,) = engine.generate([prompt], SHORT)
        assert cold.num_cached_tokens == 0
        stream = engine.stream(prompt, LONG)
        next(stream)
    assert engine.stats().num_running == 0
    with tiered(model, tmp_path, num_pages=32) as engine:
        (warm,) = engine.generate([prompt], SHORT)
        assert (warm.num_cached_tokens, warm.token_ids) == (48, cold.token_ids)
        assert engine.stats().prefix_hits_disk == 48


def test_a_closed_engine_says_so_and_may_be_closed_again(model: Path, tmp_path: Path) -> None:
    engine = tiered(model, tmp_path, num_pages=32)
    engine.close()
    engine.close()
    for call in (lambda: engine.generate("34", SHORT), lambda: engine.stream("34", SHORT)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_threads_share_an_engine_and_each_gets_what_it_gets_alone(engine: Engine) -> None:
    params = [
        SamplingParams(max_tokens=3 + 7 * number, seed=number, temperature=5.0, ignore_eos=True)
        for number in range(6)
    ]
    expected = [engine.generate(str(number), own)[0] for number, own in enumerate(params)]

    def streamed(number: int) -> Completion:
        with engine.stream(str(number), params[number]) as stream:
            text = "".join(stream)
        assert text == stream.completion.text
        return stream.completion

    def whole(number: int) -> Completion:
        return engine.generate(str(number), params[number])[0]

    steps = engine.stats().num_steps
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            calls = [pool.submit(one, n) for one in (whole, streamed) for n in range(6)]
            for call, wanted in zip(calls, 2 * expected, strict=True):
                found = call.result(timeout=60)
                assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)
    most = max(len(answer.token_ids) for answer in expected)
    total = 2 * sum(len(answer.token_ids) for answer in expected)
    assert 3 * most <= engine.stats().num_steps - steps < 3 * total, "nobody shared a step"


def test_who_waits_for_an_engine_that_another_thread_closes_is_told(
    model: Path, tmp_path: Path
) -> None:
    engine = tiered(model, tmp_path, num_pages=32)
    with ThreadPoolExecutor(3) as pool:
        stream = engine.stream("34", LONG)
        next(stream)
        calls = [pool.submit(engine.generate, "34", LONG) for _ in range(3)]
        engine.close()
        for call in calls:
            with pytest.raises(RuntimeError, match="closed"):
                call.result(timeout=60)
    assert "closed" in repr(engine)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_signal_that_closes_an_engine_at_work_ends_the_call(
    is_streamed: bool, model: Path, tmp_path: Path
) -> None:
    engine = tiered(model, tmp_path, num_pages=32)
    step, refused = engine.core.step, []

    def interrupted() -> list[RequestOutput]:
        outputs = step()
        if engine.core.stats().num_steps == 5:
            signal.raise_signal(signal.SIGUSR1)
        return outputs

    def handle(*_: object) -> None:
        with pytest.raises(RuntimeError, match="at work in this thread") as caught:
            engine.generate("3", SHORT)
        refused.append(caught.value)
        engine.close()

    engine.core.step = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        call = (
            (lambda: list(engine.stream("34", LONG)))
            if is_streamed
            else (lambda: engine.generate("34", LONG))
        )
        with pytest.raises(RuntimeError, match="closed"):
            call()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused
    assert engine.core.stats().num_running == 0


def test_a_signal_that_closes_an_engine_whose_call_waits_for_its_turn_ends_the_call(
    model: Path, tmp_path: Path
) -> None:
    engine = tiered(model, tmp_path, num_pages=32)
    taken, released = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._turns:
            taken.set()
            released.wait(30)

    def handle(*_: object) -> None:
        engine.close()
        released.set()

    before = signal.signal(signal.SIGALRM, handle)
    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(30)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(RuntimeError, match="closed"):
            engine.generate("34", LONG)
    finally:
        signal.signal(signal.SIGALRM, before)
    holder.join(30)
    assert engine.core.stats().num_running == 0


def test_a_fork_is_told_to_make_an_engine_of_its_own(engine: Engine) -> None:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            engine.generate("3", SHORT)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as told:
        assert f"process {child} is a fork" in told.read()


def test_a_reset_forgets_the_disk_too(model: Path, tmp_path: Path) -> None:
    prompt = [18 + number % 10 for number in range(50)]
    with tiered(model, tmp_path, num_pages=32) as engine:
        engine.generate([prompt], SHORT)
    with tiered(model, tmp_path, num_pages=32) as engine:
        assert engine.reset_prefix_cache() == 3
        assert engine.generate([prompt], SHORT)[0].num_cached_tokens == 0
        assert engine.reset_prefix_cache() >= 3
    with tiered(model, tmp_path, num_pages=32) as engine:
        assert engine.generate([prompt], SHORT)[0].num_cached_tokens == 0


def test_retained_prompts_outlast_others(model: Path) -> None:
    prompts = [[18 + number % 10, *range(30, 80)] for number in range(10)]
    with Engine(str(model), deployment=Deployment(max_model_len=128, num_pages=16)) as engine:
        engine.generate([prompts[0]], SHORT, retain_seconds=float("inf"))
        for prompt in prompts[1:]:
            engine.generate([prompt], SHORT)
        assert engine.generate([prompts[0]], SHORT)[0].num_cached_tokens == 48
        assert engine.generate([prompts[1]], SHORT)[0].num_cached_tokens == 0
        engine.chat([{"role": "user", "content": "34"}], SHORT, retain_seconds=60)
        with engine.stream("34", SHORT, retain_seconds=60) as stream:
            list(stream)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "1h", None, True])
def test_what_is_no_time_to_retain_is_refused_by_name(engine: Engine, seconds: Any) -> None:
    with pytest.raises(RequestError, match="retain_seconds") as caught:
        engine.generate("34", SHORT, retain_seconds=seconds)
    assert caught.value.param == "retain_seconds"


PIXELS = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)


@pytest.fixture(scope="module")
def janus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("janus")
    janus_folder.save(folder)
    with Engine(str(folder), deployment=Deployment(num_pages=128)) as engine:
        yield engine


def _file() -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    "image",
    [PIXELS, Image.fromarray(PIXELS), _file()],
    ids=["array", "PIL", "bytes"],
)
def test_images_may_come_as_arrays_pictures_and_files(janus: Engine, image: object) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}],
        }
    ]
    answer = janus.chat(messages, SHORT)
    janus.reset_prefix_cache()
    usual = {"type": "image", "image": PIXELS}
    messages[0]["content"] = [usual, {"type": "text", "text": "What is it?"}]
    assert answer.token_ids == janus.chat(messages, SHORT).token_ids
    assert answer.num_item_tokens == {"image": janus_folder.SLOTS}
    assert answer.num_prompt_tokens > janus_folder.SLOTS
    with janus.stream(messages=messages, params=SHORT) as stream:
        assert "".join(stream) == answer.text
    assert stream.completion.num_cached_tokens > 0


def test_pictures_are_made_in_process_too(janus: Engine) -> None:
    picture = janus.draw("a house", SamplingParams(seed=3), task=ImageTask(guidance=2.0))
    assert picture.dtype == np.uint8
    assert picture.shape == (8, 8, 3)
    np.testing.assert_array_equal(
        picture, janus.draw("a house", SamplingParams(seed=3), task=ImageTask(guidance=2.0))
    )
    assert (picture != janus.draw("a mouse", SamplingParams(seed=3))).any()


def test_what_a_model_cannot_do_is_said_before_anything_runs(engine: Engine) -> None:
    silence = np.zeros(1_600, np.float32)
    with pytest.raises(RequestError, match="writes down no speech"):
        engine.transcribe(silence, rate=16_000, task=TranscriptionTask(language="de"))
    with pytest.raises(RequestError, match="does not speak"):
        engine.speak("hello")
    with pytest.raises(RequestError, match="makes no pictures"):
        engine.draw("a house")
    messages = [{"role": "user", "content": "3"}]
    with pytest.raises(RequestError, match="answers with text only"):
        engine.chat(messages, task=ChatTask(modalities=frozenset({"text", "audio"})))
    assert engine.chat(messages, SHORT, task=ChatTask()).sound is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.chat(CHAT, task="x"), "task is 'x'; it must be ChatTask"),
        (lambda e: e.chat(CHAT, task=ImageTask()), "it must be ChatTask"),
        (lambda e: e.stream(messages=CHAT, task="y"), "it must be ChatTask"),
        (lambda e: e.transcribe(b"", task="de"), "it must be TranscriptionTask"),
        (lambda e: e.speak("a", "x"), "it must be SpeechTask"),
        (lambda e: e.draw("a", task="8x8"), "it must be ImageTask"),
        (lambda e: e.draw("a", task=ImageTask(size=3)), r"Expected `array.*size"),  # type: ignore[arg-type]
        (lambda e: e.chat(CHAT, task=ChatTask(modalities="text")), r"modalities"),  # type: ignore[arg-type]
        (lambda e: e.transcribe(b"", task=TranscriptionTask(timestamps=None)), "timestamps"),  # type: ignore[arg-type]
        (lambda e: e.transcribe(b"", task=TranscriptionTask(language=3)), "language"),  # type: ignore[arg-type]
    ],
)
def test_a_task_of_a_wrong_type_is_named(
    engine: Engine, call: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        call(engine)


def test_samples_need_their_rate(engine: Engine) -> None:
    with pytest.raises(RequestError, match="samples a second as rate"):
        engine.transcribe(np.zeros(100, np.float32))


def test_pieces_of_a_stream_are_its_text_and_what_is_beside_it(engine: Engine) -> None:
    with engine.stream("A", SamplingParams(max_tokens=8, temperature=0.0)) as stream:
        pieces = list(stream.pieces())
    assert "".join(piece.text for piece in pieces) == stream.completion.text
    assert all(piece.text or piece.emitted for piece in pieces)
    assert list(stream.pieces()) == []


def test_weights_may_be_drawn_for_a_config(model: Path) -> None:
    numbers = Deployment(num_pages=32, max_model_len=128)
    told = [
        [engine.generate([18, 19], LONG)[0].token_ids for _ in range(2)]
        for load_format in ("dummy", "dummy", "auto")
        for engine in [Engine(str(model), load_format=load_format, deployment=numbers)]
    ]
    assert told[0] == told[1]
    assert told[0] != told[2]
    with pytest.raises(MstarError, match="load_format is 'fast'"):
        Engine(str(model), load_format="fast")
