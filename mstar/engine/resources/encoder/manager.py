"""EncoderManager: outputs by name, within a budget of slots."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from mstar.engine.resources.base import Deployment, Item, Opening, OutputStore, Refusal, Resource
from mstar.engine.resources.encoder.config import EncoderConfig, EncoderSpec, EncoderStep
from mstar.engine.resources.step import ResourceStep, Segment


class EncoderPlan:
    """The outputs that one step makes and reads."""

    def __init__(self, outputs: Mapping[bytes, Tensor], config: EncoderConfig) -> None:
        self._outputs = outputs
        self._config = config
        self.made: dict[bytes, Tensor] = {}

    def store(self, item: Item, output: Tensor) -> None:
        """Hand over what an encoder made of an item, ``[length, hidden_size]``."""
        expected = (item.length, self._config.hidden_size)
        assert tuple(output.shape) == expected, (tuple(output.shape), expected)
        self.made[item.name] = output

    def read(self, name: bytes) -> Tensor:
        """Return an item's output, ``[length, hidden_size]``."""
        return self._outputs[name]


class EncoderManager(OutputStore):
    """Keeper of encoder outputs.

    An output is pinned for each request from when it is made or found until the request has
    computed the item's slots; unpinned ones go when their room is needed, longest unused first.

    Args:
        resource_key: Its key among the model's resources.
        config: Shape of the outputs.
        deployment: The budget.
    """

    def __init__(self, resource_key: str, config: EncoderConfig, deployment: Deployment) -> None:
        self.resource_key = resource_key
        self.config = config
        self.budget = deployment.encoder_cache_tokens or deployment.max_num_batched_tokens
        self.is_reuse_enabled = deployment.enable_prefix_caching
        self._outputs: OrderedDict[bytes, Tensor] = OrderedDict()
        """Least recently used first."""
        self._lengths: dict[bytes, int] = {}
        """Slots of each output, reserved ones included."""
        self._pins: dict[bytes, set[str]] = {}
        """Requests that still need each output; absent: none does."""
        self._stale: set[bytes] = set()
        """Outputs from before a reset: only the requests that pinned them then may read them."""
        self._num_slots = 0
        self._num_pinned_slots = 0
        self._plan: EncoderPlan | None = None
        self.num_hits = 0
        """Items whose output was found, counted once for each request."""

    @classmethod
    def build(
        cls, spec: EncoderSpec, deployment: Deployment, resources: Mapping[str, Resource]
    ) -> Self:
        """Return a manager without outputs."""
        return cls(spec.resource_key, spec.config, deployment)

    # What the scheduler asks.

    def pin(self, item: Item) -> bool:
        """Keep an item's output for its request; returns whether it is there."""
        is_own = item.request_id in self._pins.get(item.name, ())
        if item.name not in self._outputs or (item.name in self._stale and not is_own):
            return False
        self._outputs.move_to_end(item.name)
        if not is_own:
            self._pin(item)
            self.num_hits += 1
        return True

    def has_room(self, item: Item) -> bool:
        """Tell whether an output of this size fits beside what is pinned."""
        return self._num_pinned_slots + item.length <= self.budget

    # A request's life.

    def ever_fits(self, opening: Opening) -> Refusal | None:
        """Refuse an item that is larger than the budget beside what stays for the whole stream."""
        beside = sum(span.length for span in opening.context)
        lengths = [span.length for span in opening.spans if span.digest is not None]
        longest = max(lengths, default=0)
        if beside + longest <= self.budget:
            return None
        more = f" beside {beside} that are attended to" if beside and longest else ""
        return Refusal(
            self.resource_key,
            f"an item of {longest or beside} slots{more} exceeds the {self.budget} slots that "
            "encoder outputs may take",
            remedy="make it smaller, or raise encoder_cache_tokens",
            param="prompt",
        )

    def close(self, request_id: str) -> None:
        """Unpin all that the request needed."""
        for name in [name for name, owners in self._pins.items() if request_id in owners]:
            self._unpin(name, request_id)

    # A step's life.

    def admit(self, segments: tuple[Segment, ...], step: ResourceStep) -> Refusal | None:
        """Make room for what the step makes."""
        assert isinstance(step, EncoderStep), type(step).__name__
        # What is made anew after a reset takes the old output's place.
        needed = sum(item.length for item in step.made if item.name not in self._stale)
        if self._num_pinned_slots + needed > self.budget:
            return Refusal(
                self.resource_key,
                f"{needed} slots of encoder output are needed; {self._num_pinned_slots} of "
                f"{self.budget} are in use",
            )
        for name in list(self._outputs):
            if self._num_slots + needed <= self.budget:
                break
            if name not in self._pins:
                self._drop(name)
        for item in step.made:
            if item.name not in self._stale:
                assert item.name not in self._lengths, f"{item} is made twice"
                self._lengths[item.name] = item.length
                self._num_slots += item.length
            self._pin(item)
        return None

    def rollback(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Give back the room of what will not be made."""
        assert isinstance(step, EncoderStep), type(step).__name__
        for item in step.made:
            self._unpin(item.name, item.request_id)

    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> EncoderPlan:
        """Return where outputs are put and read."""
        self._plan = EncoderPlan(self._outputs, self.config)
        return self._plan

    def plan_fixed(
        self,
        size: int,
        segments: tuple[Segment, ...],
        step: ResourceStep,
        plans: Mapping[str, Any],
        ahead: int = 0,
    ) -> EncoderPlan | None:
        """Return the plan of a step that makes and reads nothing; there is none for others.

        What comes behind such a step are tokens that were generated, which read nothing either.
        """
        assert isinstance(step, EncoderStep), type(step).__name__
        return None if step.made or step.num_read else EncoderPlan({}, self.config)

    def commit(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Keep what was made; let go of what is not needed any more."""
        assert isinstance(step, EncoderStep), type(step).__name__
        for item in step.made:
            assert self._plan is not None, "a step commits before it is planned"
            self._outputs[item.name] = self._plan.made[item.name]
            self._outputs.move_to_end(item.name)
            self._stale.discard(item.name)
        self._plan = None
        for item in step.done:
            self._unpin(item.name, item.request_id)

    def counters(self) -> Mapping[str, int]:
        """Return how many items' outputs were found."""
        return {"num_encoder_hits": self.num_hits}

    def reset(self) -> int:
        """Forget all outputs, those that running requests need once they have read them."""
        self._stale.update(self._pins)
        idle = [name for name in self._outputs if name not in self._pins]
        for name in idle:
            self._drop(name)
        return len(idle)

    def check(self) -> None:
        """Verify the counts of slots and that only what is there is pinned."""
        assert self._lengths.keys() >= self._outputs.keys()
        for name, output in self._outputs.items():
            assert len(output) == self._lengths[name], (len(output), self._lengths[name])
        assert self._pins.keys() <= self._lengths.keys()
        assert all(self._pins.values()), "a pin without an owner"
        assert self._stale <= self._pins.keys(), "an output from before a reset is kept"
        assert self._num_slots == sum(self._lengths.values()) <= self.budget
        pinned = sum(self._lengths[name] for name in self._pins)
        assert self._num_pinned_slots == pinned, (self._num_pinned_slots, pinned)

    def _pin(self, item: Item) -> None:
        owners = self._pins.setdefault(item.name, set())
        if not owners:
            self._num_pinned_slots += self._lengths[item.name]
        owners.add(item.request_id)

    def _unpin(self, name: bytes, request_id: str) -> None:
        owners = self._pins.get(name)
        if owners is None or request_id not in owners:
            return
        owners.discard(request_id)
        if owners:
            return
        del self._pins[name]
        self._num_pinned_slots -= self._lengths[name]
        if name not in self._outputs or name in self._stale or not self.is_reuse_enabled:
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        self._outputs.pop(name, None)
        self._stale.discard(name)
        self._num_slots -= self._lengths.pop(name)
