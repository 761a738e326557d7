"""Commands that run models: `mstar serve | generate | chat | env`.

What a command needs is imported when it runs, so that help and mistakes answer at once.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from mstar.cli.arguments import (
    SAMPLING_FLAGS,
    add_deployment,
    add_http,
    add_model,
    add_sampling,
    add_voice,
    engine_options,
    sampling_params,
)
from mstar.cli.cache_arguments import add_server, client_of
from mstar.cli.chat import MAX_TOKENS, TEMPERATURE, Recording, Talk, sampling_defaults
from mstar.cli.parser import Parser
from mstar.cli.sound_file import SoundFiles
from mstar.errors import ConfigError, MstarError, RequestError
from mstar.server.waiting import wait_briefly
from mstar.version import __version__

if TYPE_CHECKING:
    from mstar.engine.resources.sampler.config import SamplingParams
    from mstar.library import Completion, Engine, TextStream
    from mstar.server.config import EngineOptions

# Exit status of a user's mistake, as argparse has it.
_EXIT_USER = 2


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
    add_model(serve)
    add_http(serve)
    add_deployment(serve)

    generate = command(
        "generate", _generate, "Answer prompts and end; no server is started.", rest="prompts"
    )
    add_model(generate)
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
    add_sampling(generate, max_tokens=64)
    add_deployment(generate)

    chat = command("chat", _chat, "Talk to a model in the terminal, in writing or by voice.")
    add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told beforehand")
    add_voice(chat)
    add_server(chat, default=None)
    add_sampling(chat, max_tokens=MAX_TOKENS, temperature=f"the checkpoint's, or {TEMPERATURE}")
    add_deployment(chat)

    cache.add_command(commands)
    kv_events.add_command(commands)
    graph.add_command(commands)
    command("env", environment.show, "Show versions, hardware, kernels, settings and models.")
    return parser


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
            engine=engine_options(arguments),
            host=arguments.host,
            port=arguments.port,
            served_names=tuple(arguments.served_model_name),
            api_key=api_key,
            num_workers=arguments.num_preprocess_workers,
            max_num_queued_reqs=arguments.max_num_queued_reqs,
            shutdown_timeout=arguments.shutdown_timeout,
            stall_timeout=arguments.stall_timeout,
            preprocess_timeout=arguments.preprocess_timeout,
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


def _own_options(arguments: argparse.Namespace) -> "EngineOptions":
    """Return the options of an engine in this process.

    Raises:
        ConfigError: If they are wrong, or a server's.
    """
    options = engine_options(arguments)
    if options.kv_events_endpoint is not None:
        raise ConfigError("KV events are published by a server: leave kv_events_endpoint out")
    return options


def _load(arguments: argparse.Namespace) -> "Engine":
    from mstar.library import Engine  # noqa: PLC0415

    options = _own_options(arguments)
    deployment = options.deployment("auto")
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
    params = sampling_params(arguments)
    # A wrong flag is told of before any file is read.
    _own_options(arguments)
    _check_prompts(prompts, params, arguments)
    with _load(arguments) as engine:
        started = time.monotonic()
        if len(prompts) == 1:
            prompt, messages = prompts[0], None
            if arguments.chat:
                prompt, messages = None, _as_chat(prompts[0])
            answers = [_print_stream(engine.stream(prompt, params, messages=messages))]
        elif arguments.chat:
            answers = [engine.chat(_as_chat(prompt), params) for prompt in prompts]
        else:
            answers = engine.generate(prompts, params)
        if len(prompts) > 1:
            for prompt, answer in zip(prompts, answers, strict=True):
                print(f"--- {prompt}", answer.text, sep="\n")
        _print_counts(answers, time.monotonic() - started)
    return 0


def _print_stream(stream: "TextStream") -> "Completion":
    with stream:
        try:
            for text in stream:
                print(text, end="", flush=True)
        finally:
            # What is there stays, also where the user has had enough.
            print()
        return stream.completion


def _print_counts(answers: "Sequence[Completion]", seconds: float) -> None:
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
    sampling_params(arguments)
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
            params = sampling_params(arguments, sampling_defaults(arguments.model))
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
        name: value for name in SAMPLING_FLAGS if (value := getattr(arguments, name)) is not None
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
