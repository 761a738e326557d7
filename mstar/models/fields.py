"""Fields: typed access to a config.json, with messages that name the field at fault."""

from collections.abc import Mapping
from math import inf
from typing import Any

from mstar.errors import WeightsError


class Fields:
    """Typed access to an object of a config.json; a ``null`` counts as missing.

    Every method raises ``WeightsError`` for a field that is missing, without a default, or of a
    wrong type or size.

    Args:
        config: The object.
        where: What messages call it.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "the config") -> None:
        self.config = config
        self.where = where

    def get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return a field's value, which is of ``kind``; a default of ``None`` is none."""
        value = self.config.get(name)
        if value is None:
            if default is None:
                raise WeightsError(f"{self.where} lacks {name!r}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise WeightsError(f"{name!r} of {self.where} is {value!r:.60}, of a wrong type")
        return value

    def is_set(self, name: str) -> bool:
        """Tell whether the field is there and neither null, false nor an empty object."""
        value = self.config.get(name)
        return value is not None and value is not False and value != {}

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least ``minimum``."""
        value: int = self.get(name, int, default)
        if value < minimum:
            raise WeightsError(
                f"{name!r} of {self.where} is {value}; it must be at least {minimum}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number that is not negative."""
        value = float(self.get(name, (int, float), default))
        if not 0 <= value < inf:
            raise WeightsError(
                f"{name!r} of {self.where} is {value}; it must be finite and not negative"
            )
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.number(name, default)
        if value == 0:
            raise WeightsError(f"{name!r} of {self.where} is 0; it must be positive")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        return str(self.get(name, str, default))

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        return bool(self.get(name, bool, default))

    def mapping(self, name: str) -> "Fields":
        """Return the fields of an object inside, empty where it is missing."""
        return Fields(self.get(name, Mapping, {}), f"{self.where}'s {name}")

    def updated(self, other: "Fields") -> "Fields":
        """Return these fields with those of ``other`` over them."""
        return Fields({**self.config, **other.config}, other.where)

    def over(self, defaults: Mapping[str, Any]) -> "Fields":
        """Return these fields over defaults; a null does not hide a default."""
        own = {k: v for k, v in self.config.items() if v is not None or k not in defaults}
        return Fields({**defaults, **own}, self.where)

    @property
    def has_mappings(self) -> bool:
        """Whether a value is an object itself."""
        return any(isinstance(value, Mapping) for value in self.config.values())

    def has_only(self, *names: str) -> bool:
        """Tell whether there is no field but these."""
        return set(self.config) <= set(names)
