"""The settings of a server, as the command line gives them."""

from dataclasses import dataclass, field, replace
from typing import Any

from mstar.engine.resources.attention.config import check_backend
from mstar.engine.resources.base import Deployment
from mstar.errors import ConfigError
from mstar.models.files import default_cache_dir
from mstar.preprocess.media.limits import MediaLimits

_MEDIA_LIMITS = MediaLimits()


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the engine process is started with; ``None`` leaves the choice to the engine.

    Raises:
        ConfigError: If a number is out of its range, or numbers do not go together.
    """

    model: str
    """Folder, file or known name of the checkpoint."""
    dtype: str | None = None
    """Name of a torch dtype, or ``None`` for the model's own."""
    load_format: str = "auto"
    """``dummy``: weights are drawn, for measuring."""
    device: str = "cpu"
    max_model_len: int | None = None
    """Prompt and output of one request together, in tokens."""
    page_size: int | None = None
    """Slots of one KV page, in tokens."""
    num_pages: int | None = None
    """KV pages; wins over ``kv_cache_bytes``."""
    kv_cache_bytes: int | None = None
    """Memory of the KV pool, in bytes."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory to use, where neither of the two above is given."""
    max_num_seqs: int | None = None
    """Requests that run at once, at most."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step, at most."""
    enable_prefix_caching: bool = True
    attention_backend: str | None = None
    tensor_parallel_size: int = 1
    """Devices that share the model, a process each."""
    overlap: bool = True
    """Launch a step before the tokens of the one before it are read, where that can be."""
    host_cache_bytes: int = 0
    """Host memory for evicted pages, in bytes; 0: none."""
    disk_cache_bytes: int = 0
    """Disk space for evicted pages, in bytes; 0: none."""
    disk_cache_dir: str | None = None
    """Folder of pages on disk; ``None``: in the user's cache."""
    retention_share: float = 0.5
    """Share of the KV pages that requests may have protected from eviction."""
    kv_events_endpoint: str | None = None
    """Where KV events are published; ``None``: nowhere."""
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = ""
    debug_checks: bool = False
    """Verify all books whenever the engine becomes idle."""
    seed: int | None = None
    """Decides what requests without a seed of their own are given; ``None``: chance does."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(
                f"seed is {self.seed}; it must lie between {-(2**63)} and {2**64 - 1}"
            )
        # The dtype is known once the checkpoint is open; no number depends on it.
        self.deployment(self.dtype or "float32").check()
        check_backend(self.attention_backend)
        if self.disk_cache_dir is not None and not self.disk_cache_bytes:
            raise ConfigError(
                f"disk_cache_dir is {self.disk_cache_dir!r} and nothing may be put there: give "
                "disk_cache_bytes (--disk-cache-space) too"
            )
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ConfigError(
                "KV events are replayed and not published: give kv_events_endpoint too"
            )

    def deployment(self, dtype: str) -> Deployment:
        """Return the deployment that these options ask for, in ``dtype``."""
        given = Deployment(
            device=self.device,
            dtype=dtype,
            num_pages=self.num_pages,
            enable_prefix_caching=self.enable_prefix_caching,
            attention_backend=self.attention_backend,
            tensor_parallel_size=self.tensor_parallel_size,
            overlap=self.overlap,
            seed=self.seed,
            host_cache_bytes=self.host_cache_bytes,
            disk_cache_bytes=self.disk_cache_bytes,
            disk_cache_dir=self.disk_cache_dir or str(default_cache_dir() / "kv"),
            retention_share=self.retention_share,
            kv_events=self.kv_events_endpoint is not None,
        )
        numbers = {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "page_size": self.page_size,
            "kv_cache_bytes": self.kv_cache_bytes,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }
        chosen: dict[str, Any] = {k: v for k, v in numbers.items() if v is not None}
        return replace(given, **chosen)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a whole server is started with.

    Raises:
        ConfigError: If a number is out of its range.
    """

    engine: EngineOptions
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    served_names: tuple[str, ...] = ()
    """Names that requests may use; the first is the one in answers. Empty: the model's own."""
    api_key: str | None = field(default=None, repr=False)
    """Demanded as a bearer token on every route but ``/health`` and ``/ready``."""
    num_workers: int = 1
    """Preprocess worker processes."""
    max_num_queued_reqs: int | None = None
    """Requests without a first token beyond which new ones get 429; ``None``: no limit."""
    shutdown_timeout: float = 30.0
    """Time for running requests to finish after SIGTERM, in seconds."""
    stall_timeout: float = 60.0
    """Silence of the engine after which ``/ready`` says 503, in seconds."""
    preprocess_timeout: float = 120.0
    """Time after which a worker that is still at one request is ended, in seconds."""
    keep_alive: float = 15.0
    """Silence of a stream after which a comment is sent, in seconds."""
    trust_chat_template_kwargs: bool = False
    """Requests may set variables of the chat template."""
    max_body_nbytes: int = 64 * 2**20
    """Bytes of one request's body; a recording of 25 MiB or pictures of several cameras fit."""
    media: MediaLimits = _MEDIA_LIMITS
    """What images and recordings of requests may cost."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must lie between 0 and 65535")
        for name, low in (
            ("num_workers", 1),
            ("max_num_queued_reqs", 1),
            ("max_body_nbytes", 1024),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} is {value}; it must be at least {low}")
        for name, shortest in (
            ("shutdown_timeout", 0),
            ("stall_timeout", 0),
            ("preprocess_timeout", 1),
            ("keep_alive", 0),
        ):
            value = getattr(self, name)
            if not shortest <= value <= 86_400:
                raise ConfigError(
                    f"{name} is {value}; it must lie between {shortest} and 86400 seconds"
                )
        if self.api_key == "":
            raise ConfigError("the API key is empty; leave it out to serve without one")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use, never empty."""
        return self.served_names or (self.engine.model,)
