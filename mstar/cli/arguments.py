"""Flags of the commands that run models, and what is made of them."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar.cli.parser import at_least

if TYPE_CHECKING:
    from mstar.engine.resources.sampler.config import SamplingParams
    from mstar.server.config import EngineOptions

_UNITS = {
    "": 1,
    **{unit: 10 ** (3 * power) for power, unit in enumerate("kmgt", 1)},
    **{f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", 1)},
}
SAMPLING_FLAGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Flags that are fields of sampling parameters."""


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


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model's name."""
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a GGUF file, a built-in name or a Hugging Face id"
    )


def add_voice(parser: argparse.ArgumentParser) -> None:
    """Add what a conversation by voice takes."""
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


def add_http(parser: argparse.ArgumentParser) -> None:
    """Add where and how a server listens."""
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
        "--preprocess-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds after which a worker still at one request is ended (default: %(default)s)",
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
    add_media(parser)


def add_media(parser: argparse.ArgumentParser) -> None:
    """Add what images and recordings of requests may cost."""
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


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """Add what an engine is started with."""
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
    add("--seed", type=int, help="decides what requests without a seed of their own are given")
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
    add(
        "--kv-cache-memory",
        type=parse_size,
        metavar="SIZE",
        help="memory of the model's KV caches together: 2GiB",
    )
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
    add_reuse(parser)
    add(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="what goes to standard error (default: %(default)s)",
    )


def add_reuse(parser: argparse.ArgumentParser) -> None:
    """Add what is reused, and where it is kept."""
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


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int, temperature: str = "1") -> None:
    """Add how answers are sampled.

    Args:
        parser: Of the command.
        max_tokens: The default of ``--max-tokens``.
        temperature: What help says of the default temperature.
    """
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


def sampling_params(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> "SamplingParams":
    """Return how answers are sampled.

    Args:
        arguments: Of a command with ``add_sampling``.
        defaults: What counts where a flag is not given.
    """
    from mstar.engine.resources.sampler.config import SamplingParams  # noqa: PLC0415

    given = {
        name: value for name in SAMPLING_FLAGS if (value := getattr(arguments, name)) is not None
    }
    return SamplingParams(
        **{**(defaults or {}), **given},
        seed=arguments.sampling_seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )


def engine_options(arguments: argparse.Namespace) -> "EngineOptions":
    """Return what the engine is started with.

    Args:
        arguments: Of a command with ``add_model`` and ``add_deployment``.
    """
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
