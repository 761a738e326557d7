"""The root: all that a deployment's KV depends on, by name, and the one key over it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.spec import NodeResourceSpec

RECIPE = "mstar-root-v1"
_NEEDED = ("weights",)
# The text of an object that has none of its own: another one in every process.
_ADDRESS = " at 0x"


@dataclass(frozen=True, kw_only=True)
class RootConstants:
    """What a deployment's keys commit to; a part that is missing keeps the cache shut."""

    constants: Mapping[str, str]
    """Every part by name, in the order in which the root is made of them."""
    missing: tuple[str, ...] = ()
    """What is unknown or switched off, in words; empty: the cache is open."""

    @property
    def root(self) -> bytes | None:
        """Key of the empty prefix; ``None``: nothing is shared between requests."""
        return None if self.missing else root_key(self.constants)

    def report(self) -> dict[str, object]:
        """Return the root in hexadecimal, what it is made of and what is missing, by name."""
        root = self.root
        return {
            "root": None if root is None else root.hex(),
            "constants": dict(self.constants),
            "missing": list(self.missing),
        }


def root_key(constants: Mapping[str, str]) -> bytes:
    """Return the fingerprint of constants, names and values in their order."""
    return fingerprint(*(part for item in constants.items() for part in item))


def root_constants(
    model_constants: Mapping[str, str] | None,
    specs: Sequence[NodeResourceSpec],
    deployment: Deployment,
) -> RootConstants:
    """Return everything that the KV of a model in a deployment depends on.

    Args:
        model_constants: What the model states of itself, ``weights`` (their content name) among
            it; ``None``: nothing is known.
        specs: The resources its nodes need.
        deployment: The engine's numbers; its dtype is the one the model was loaded in.
    """
    stated = model_constants or {}
    constants = {"recipe": RECIPE, **stated}
    constants["adapter"] = "none"
    constants["dtype"] = deployment.dtype
    constants["page_size"] = str(deployment.page_size)
    for spec in specs:
        constants[f"resource.{spec.resource_key}"] = repr(spec.config)
    missing = [] if deployment.enable_prefix_caching else ["prefix caching is switched off"]
    missing += [
        f"the model does not state {name!r}: content that has no name is never reused"
        for name in _NEEDED
        if name not in stated
    ]
    missing += [f"{name!r} is empty" for name, value in constants.items() if not value]
    missing += [
        f"{name!r} has no text that is the same in every process"
        for name, value in constants.items()
        if _ADDRESS in value
    ]
    return RootConstants(constants=constants, missing=tuple(missing))
