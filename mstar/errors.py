"""The exceptions that mstar raises on purpose.

::

    MstarError
    ├── ConfigError            a setting of model or deployment is wrong    (a ValueError)
    ├── ModelNotFoundError     a model's name leads to no checkpoint        (a FileNotFoundError)
    ├── WeightsError           a checkpoint's files are broken              (a ValueError)
    ├── TraceError             a request trace is broken                    (a ValueError)
    ├── UnsupportedError       nothing here can do it; carries the reasons  (a NotImplementedError)
    ├── StorageError           a store could not do what it must            (an OSError)
    ├── EngineDeadError        the engine process ended when needed         (a RuntimeError)
    └── RequestError           a request is wrong; carries param and code   (a ValueError)
        ├── ContextLengthError     prompt or output exceed the model's context
        └── CapacityError          the request could never fit the KV pool
"""

from collections.abc import Sequence


class MstarError(Exception):
    """Base of every deliberate error."""


class ConfigError(MstarError, ValueError):
    """A setting of a model or a deployment is out of its range."""


class ModelNotFoundError(MstarError, FileNotFoundError):
    """A model's name is neither a folder, nor a file, nor a known name."""


class WeightsError(MstarError, ValueError):
    """A checkpoint's file is missing, truncated or does not fit its config."""


class TraceError(MstarError, ValueError):
    """A trace of requests cannot be read, or a line of it is no request."""


class UnsupportedError(MstarError, NotImplementedError):
    """No implementation here can do what was asked.

    Args:
        message: What was asked for.
        reasons: Why each candidate refused.
    """

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join([message, *self.reasons]) if self.reasons else message)


class StorageError(MstarError, OSError):
    """A store could not do what must not fail in silence."""


class EngineDeadError(MstarError, RuntimeError):
    """The engine process ended before it answered."""


class RequestError(MstarError, ValueError):
    """One request is wrong; the others are not affected.

    Args:
        message: Names the value, the limit and the remedy.
        param: The request's field at fault, as the user wrote it.
        code: A stable slug that programs may branch on.
    """

    default_code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.message = message
        self.param = param
        self.code = code or self.default_code
        super().__init__(message)


class ContextLengthError(RequestError):
    """The prompt, or prompt and output together, exceed the context."""

    default_code = "context_length_exceeded"


class CapacityError(RequestError):
    """The request needs more KV pages than the whole pool has."""

    default_code = "kv_capacity_exceeded"
