"""Commands that run models: `mstar serve | generate | chat | env`.

What a command needs is imported when it runs, so that help and mistakes answer at once.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar.cli import cache, environment, graph, kv_events
from mstar.cli.answerers import (
    Answerer,
    EngineAnswerer,
    ServerAnswerer,
    abilities_here,
    abilities_there,
    check_abilities,
)
from mstar.cli.cache_arguments import add_server, client_of
from mstar.cli.chat import MAX_TOKENS, TEMPERATURE, Recording, Talk, sampling_defaults
from mstar.cli.parser import Parser, at_least
from mstar.cli.sound_file import SoundFiles
from mstar.errors import MstarError, RequestError
from mstar.server.waiting import wait_briefly
from mstar.version import __version__

if TYPE_CHECKING:
    from mstar.engine.resources.sampler.config import SamplingParams
    from mstar.library import Completion, Engine
    from mstar.server.config import EngineOptions

# Exit status of a user's mistake, as argparse has it.
_EXIT_USER = 2
_UNITS = {
    "": 1,
    **{unit: 10 ** (3 * power) for power, unit in enumerate("kmgt", 1)},
    **{f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", 1)},
}
_SAMPLING_FLAGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    Args:
        argv: Arguments after the program's name; ``None`` takes the process's own.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer may have characters that a terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    # Before any command loads torch.
    wait_briefly(os.environ)
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except MstarError as error:
        print(f"mstar: {error}", file=sys.stderr)
        return _EXIT_USER
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, and Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# Arguments


def parse_size(text: str) -> int:
    """Return the bytes that a text names.

    Raises:
        argparse.ArgumentTypeError: If it names none.

    >>> parse_size("2GiB"), parse_size("500M"), parse_size("1024")
    (2147483648, 500000000, 1024)
    """
    digits = text.strip().rstrip("bBiIkKmMgGtT")
    unit = text.strip()[len(digits) :].lower().removesuffix("b")
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number with K, M, G, T, KiB, MiB, GiB or "
            "TiB"
        ) from None
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above zero")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mstar",
        description="Serve and run models, computing what requests have in common only once.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mstar {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, rest: str | None = None
    ) -> Parser:
        added = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, rest=rest
        )
        added.set_defaults(run=run)
        return added

    serve = command("serve", _serve, "Answer OpenAI-style requests over HTTP.")
    _add_model(serve)
    _add_http(serve)
    _add_deployment(serve)

    generate = command(
        "generate", _generate, "Answer prompts and end; no server is started.", rest="prompts"
    )
    _add_model(generate)
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="what is to be continued")
    generate.add_argument(
        "-p",
        "--prompt",
        action="append",
        dest="more_prompts",
        default=[],
        metavar="PROMPT",
        help="another; one that begins with - is written --prompt='-1 is'",
    )
    generate.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    _add_sampling(generate, max_tokens=64)
    _add_deployment(generate)

    chat = command("chat", _chat, "Talk to a model in the terminal, in writing or by voice.")
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told beforehand")
    _add_voice(chat)
    add_server(chat, default=None)
    _add_sampling(chat, max_tokens=MAX_TOKENS, temperature=f"the checkpoint's, or {TEMPERATURE}")
    _add_deployment(chat)

    cache.add_command(commands)
    kv_events.add_command(commands)
    graph.add_command(commands)
    command("env", environment.show, "Show versions, hardware, kernels, settings and models.")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a GGUF file, a built-in name or a Hugging Face id"
    )


def _add_voice(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("voice")
    add = group.add_argument
    add(
        "--audio",
        action="append",
        default=[],
        type=_path,
        metavar="FILE",
        help="ask with a recording (WAV, FLAC, MP3, OGG); several are asked one after the other",
    )
    add(
        "--speak",
        type=_path,
        metavar="OUT.wav",
        help="write the sound of the answer there; further answers go to OUT-2.wav, OUT-3.wav, …",
    )
    add("--voice", metavar="NAME", help="who speaks (default: the model's own voice)")


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _add_http(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use (default: MODEL)",
    )
    add("--api-key", metavar="KEY", help="demand this bearer token (default: $MSTAR_API_KEY)")
    add(
        "--max-num-queued-reqs",
        type=at_least(1),
        metavar="N",
        help="answer 429 while so many wait for their first token (default: no limit)",
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for running requests after SIGTERM (default: %(default)s)",
    )
    add(
        "--stall-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds of silence after which the engine counts as stuck (default: %(default)s)",
    )
    add(
        "--sse-keep-alive-interval",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds between comments on a silent stream; 0: none (default: %(default)s)",
    )
    add(
        "--num-preprocess-workers",
        type=at_least(1),
        default=1,
        metavar="N",
        help="processes that template and tokenize (default: %(default)s)",
    )
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests set variables of the chat template",
    )
    _add_media(parser)


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images and recordings of requests")
    add = group.add_argument
    add(
        "--max-body-size",
        type=parse_size,
        default=64 * 2**20,
        metavar="SIZE",
        help="of one request, everything in it (default: 64MiB)",
    )
    add(
        "--max-image-pixels",
        type=at_least(1),
        default=2**26,
        metavar="N",
        help="of one image, by its header (default: %(default)s)",
    )
    add(
        "--max-audio-seconds",
        type=float,
        default=3600.0,
        metavar="S",
        help="of one request's recordings (default: %(default)s)",
    )


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of weights and KV cache (default: %(default)s)",
    )
    add(
        "--load-format",
        default="auto",
        choices=("auto", "dummy"),
        help="dummy: draw weights for the model's config, for measuring (default: %(default)s)",
    )
    add(
        "--device",
        default="cpu",
        help="where the model runs: cpu, cuda, or cuda:N (default: %(default)s)",
    )
    add("--seed", type=int, help="seed of everything that has no seed of its own")
    add(
        "--attention-backend",
        metavar="NAME",
        help="eager, sdpa, paged or flashinfer (default: best)",
    )
    add(
        "--tensor-parallel-size",
        type=at_least(1),
        default=1,
        metavar="N",
        help="devices that share the model, a process each (default: %(default)s)",
    )
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="launch a step on a GPU before the tokens of the one before it are read",
    )
    group = parser.add_argument_group("limits and KV cache")
    add = group.add_argument
    add(
        "--max-model-len",
        type=at_least(2),
        metavar="N",
        help="tokens of prompt and answer together (default: what the model and the cache allow)",
    )
    add(
        "--max-num-seqs",
        type=at_least(1),
        metavar="N",
        help="requests that run at once (default: 64, on a GPU 256)",
    )
    add(
        "--max-num-batched-tokens",
        type=at_least(1),
        metavar="N",
        help="tokens of one step (default: 2048, on a GPU 8192)",
    )
    add(
        "--block-size",
        type=at_least(1),
        metavar="N",
        help="tokens of one KV page (default: 16, on a GPU 64)",
    )
    add(
        "--num-gpu-blocks-override",
        "--num-pages",
        dest="num_pages",
        type=at_least(1),
        metavar="N",
        help="KV pages, whatever memory they take",
    )
    add("--kv-cache-memory", type=parse_size, metavar="SIZE", help="memory of the KV cache: 2GiB")
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of a GPU's memory to use, the KV cache taking what is left (default: 0.9)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse what earlier requests computed",
    )
    _add_reuse(parser)
    add(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="what goes to standard error (default: %(default)s)",
    )


def _add_reuse(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reuse beyond the KV cache")
    add = group.add_argument
    add(
        "--host-cache-memory",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="host memory for pages that the KV cache evicts: 4GiB (default: none)",
    )
    add(
        "--disk-cache-space",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="disk space for them; it outlives the server (default: none)",
    )
    add("--disk-cache-dir", metavar="DIR", help="where (default: kv in the folder $MSTAR_CACHE)")
    add(
        "--retention-share",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of the KV cache that requests may protect from eviction (default: %(default)s)",
    )
    add("--kv-events-endpoint", metavar="ADDRESS", help="publish KV events: tcp://127.0.0.1:5557")
    add("--kv-events-replay-endpoint", metavar="ADDRESS", help="answer requests to replay them")
    add("--kv-events-topic", default="", metavar="TOPIC", help="topic of the events")
    add("--debug-checks", action="store_true", help="verify all books whenever nothing runs")


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int, temperature: str = "1") -> None:
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add(
        "-n",
        "--max-tokens",
        type=at_least(1),
        default=max_tokens,
        metavar="N",
        help="tokens to generate at most (default: %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 takes the likeliest token (default: {temperature})",
    )
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens up to this probability")
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    add("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the first")
    add("--repetition-penalty", type=float, metavar="X", help="above 1 avoids repetition")
    add("--presence-penalty", type=float, metavar="X", help="taken from tokens that occurred")
    add("--frequency-penalty", type=float, metavar="X", help="the same, for each occurrence")
    add("--sampling-seed", type=int, metavar="N", help="same seed, same answer")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    add("--ignore-eos", action="store_true", help="go on past the model's own end")


def _sampling(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> "SamplingParams":
    from mstar.engine.resources.sampler.config import SamplingParams  # noqa: PLC0415

    given = {
        name: value for name in _SAMPLING_FLAGS if (value := getattr(arguments, name)) is not None
    }
    return SamplingParams(
        **{**(defaults or {}), **given},
        seed=arguments.sampling_seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )


def _engine_options(arguments: argparse.Namespace) -> "EngineOptions":
    from mstar.server.config import EngineOptions  # noqa: PLC0415

    return EngineOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        page_size=arguments.block_size,
        num_pages=arguments.num_pages,
        kv_cache_bytes=arguments.kv_cache_memory,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        enable_prefix_caching=arguments.enable_prefix_caching,
        attention_backend=arguments.attention_backend,
        tensor_parallel_size=arguments.tensor_parallel_size,
        overlap=arguments.overlap,
        host_cache_bytes=arguments.host_cache_memory,
        disk_cache_bytes=arguments.disk_cache_space,
        disk_cache_dir=arguments.disk_cache_dir,
        retention_share=arguments.retention_share,
        kv_events_endpoint=arguments.kv_events_endpoint,
        kv_events_replay_endpoint=arguments.kv_events_replay_endpoint,
        kv_events_topic=arguments.kv_events_topic,
        debug_checks=arguments.debug_checks,
        seed=arguments.seed,
        log_level=arguments.log_level,
    )


# Commands


def _serve(arguments: argparse.Namespace) -> int:
    from mstar.preprocess.media.limits import MediaLimits  # noqa: PLC0415
    from mstar.server.config import ServerConfig  # noqa: PLC0415
    from mstar.server.run import serve  # noqa: PLC0415

    api_key = arguments.api_key
    if api_key is None:
        api_key = os.environ.get("MSTAR_API_KEY")
    environment.warn_about_unknown_variables()
    return serve(
        ServerConfig(
            engine=_engine_options(arguments),
            host=arguments.host,
            port=arguments.port,
            served_names=tuple(arguments.served_model_name),
            api_key=api_key,
            num_workers=arguments.num_preprocess_workers,
            max_num_queued_reqs=arguments.max_num_queued_reqs,
            shutdown_timeout=arguments.shutdown_timeout,
            stall_timeout=arguments.stall_timeout,
            keep_alive=arguments.sse_keep_alive_interval,
            trust_chat_template_kwargs=arguments.trust_request_chat_template,
            max_body_nbytes=arguments.max_body_size,
            media=MediaLimits(
                image_pixels=arguments.max_image_pixels,
                audio_seconds=arguments.max_audio_seconds,
                request_audio_seconds=arguments.max_audio_seconds,
            ),
            log_level=arguments.log_level,
        )
    )


def _load(arguments: argparse.Namespace) -> "Engine":
    from mstar.library import Engine  # noqa: PLC0415

    options = _engine_options(arguments)
    deployment = options.deployment("auto")
    if options.seed is not None:
        import torch  # noqa: PLC0415

        torch.manual_seed(options.seed)
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415

    started = time.monotonic()
    with tqdm(
        desc=f"loading {arguments.model}",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}",
        leave=False,
        disable=None,
        file=sys.stderr,
    ) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        engine = Engine(
            arguments.model,
            dtype=options.dtype or "auto",
            load_format=options.load_format,
            deployment=deployment,
            progress=progress,
        )
    print(f"loaded {arguments.model} in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return engine


def _generate(arguments: argparse.Namespace) -> int:
    prompts = arguments.prompts + arguments.more_prompts
    params = _sampling(arguments)
    # A wrong flag is told of before any file is read.
    _engine_options(arguments)
    _check_prompts(prompts, params, arguments)
    with _load(arguments) as engine:
        started = time.monotonic()
        if arguments.chat:
            answers = [engine.chat(_as_chat(prompt), params) for prompt in prompts]
        else:
            answers = engine.generate(prompts, params)
        _print_answers(prompts, answers, time.monotonic() - started)
    return 0


def _print_answers(prompts: Sequence[str], answers: "Sequence[Completion]", seconds: float) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answers) > 1:
            print(f"--- {prompt}")
        print(answer.text)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    num_prompt = sum(answer.num_prompt_tokens for answer in answers)
    num_cached = sum(answer.num_cached_tokens for answer in answers)
    print(
        f"{num_prompt} tokens in ({num_cached} cached), {num_tokens} out, {seconds:.2f} s, "
        f"{num_tokens / max(seconds, 1e-9):.1f} tokens/s",
        file=sys.stderr,
    )


def _as_chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _check_prompts(
    prompts: Sequence[str], params: "SamplingParams", arguments: argparse.Namespace
) -> None:
    """Refuse prompts that the engine would refuse, before the weights are loaded for them.

    Raises:
        RequestError: If there is none, or one is empty, or longer than ``--max-model-len`` allows,
            or the model does something else.
    """
    if not prompts:
        raise RequestError("there is no prompt; write one behind the model's name")
    from mstar.catalog import load_processor_of, load_tokenizer_of, locate  # noqa: PLC0415
    from mstar.preprocess.drafts import require  # noqa: PLC0415
    from mstar.preprocess.prompt import PromptPreparer, PromptRequest  # noqa: PLC0415

    where = locate(arguments.model)
    require("chat" if arguments.chat else "completion", load_processor_of(where))
    if "" not in prompts and arguments.max_model_len is None:
        return
    tokenizer = load_tokenizer_of(where)
    preparer = PromptPreparer(
        tokenizer, arguments.max_model_len or sys.maxsize, 1, None, tokenizer.vocab_size
    )
    for prompt in prompts:
        content: Any = {"messages": _as_chat(prompt)} if arguments.chat else {"text": prompt}
        preparer.prepare(PromptRequest(request_id="", params=params, **content))


def _chat(arguments: argparse.Namespace) -> int:
    is_here = arguments.url is None
    _sampling(arguments)
    if is_here and (arguments.audio or arguments.speak):
        takes, gives = abilities_here(arguments.model)
        _check_voice(arguments, takes, gives)
    recordings = [Recording.read(path, is_checked=is_here) for path in arguments.audio]
    with ExitStack() as stack:
        files = None
        if arguments.speak is not None:
            files = SoundFiles(arguments.speak)
            stack.callback(files.close)
        answerer: Answerer
        if is_here:
            params = _sampling(arguments, sampling_defaults(arguments.model))
            answerer = EngineAnswerer(
                stack.enter_context(_load(arguments)), params, arguments.voice
            )
        else:
            answerer = _server_answerer(arguments)
        return Talk(answerer, arguments.system, files, checks_recordings=is_here).run(recordings)


def _server_answerer(arguments: argparse.Namespace) -> ServerAnswerer:
    client = client_of(arguments)
    takes, gives = abilities_there(client, arguments.model)
    _check_voice(arguments, takes, gives)
    given = {
        name: value for name in _SAMPLING_FLAGS if (value := getattr(arguments, name)) is not None
    }
    fields = {"temperature": TEMPERATURE, **given}
    if arguments.sampling_seed is not None:
        fields["seed"] = arguments.sampling_seed
    if arguments.stop:
        fields["stop"] = arguments.stop
    if arguments.ignore_eos:
        fields["ignore_eos"] = True
    return ServerAnswerer(client, arguments.model, fields, arguments.voice)


def _check_voice(arguments: argparse.Namespace, takes: Sequence[str], gives: Sequence[str]) -> None:
    if arguments.audio:
        check_abilities(arguments.model, takes, gives, "listen")
    if arguments.speak:
        check_abilities(arguments.model, takes, gives, "speak")
