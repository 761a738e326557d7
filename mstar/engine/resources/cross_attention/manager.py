"""CrossAttentionManager: keys and values of encoder outputs by name, within a pool of pages."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.engine.resources.attention.base import AttentionBackend, AttentionPlan
from mstar.engine.resources.attention.config import AttentionConfig, LayerAttention
from mstar.engine.resources.attention.manager import pick_backend
from mstar.engine.resources.base import Deployment, Item, Opening, OutputStore, Refusal, Resource
from mstar.engine.resources.cross_attention.config import (
    CrossAttentionConfig,
    CrossAttentionSpec,
    CrossAttentionStep,
)
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.mirror import send
from mstar.engine.resources.step import ResourceStep, Segment

DEFAULT_BYTES, DEFAULT_SHARE = 512 << 20, 1 / 8
"""Memory for the keys and values, at most, where the deployment names no number of slots; on a
CUDA device its share of the device's."""
_PER_REQUEST = 2
"""Outputs that are kept then for each request that may run, at most."""


@dataclass(slots=True)
class _Output:
    """What is kept of one encoder output."""

    length: int
    pages: list[int]
    owners: set[str] = field(default_factory=set)
    """Requests that need it; it stays while there are any."""
    is_written: bool = False
    is_stale: bool = False
    """From before a reset: only its owners of then may read it, until it is made anew."""


class CrossAttentionPlan:
    """One step: writes what an encoder made, or attends to what was made before.

    Args:
        pool: Where keys and values lie.
        attention: Of the step's segments; ``None``: the step reads nothing.
        slots: int64, on the pool's device: those of the outputs that the step makes, one after
            the other, counted from the pool's first; ``None``: it makes none.
    """

    def __init__(
        self, pool: "_Pool", attention: AttentionPlan | None, slots: Tensor | None
    ) -> None:
        self._pool = pool
        self._attention = attention
        self._slots = slots
        self._left = set(range(pool.layout.num_layers))
        """Layers that are not written yet."""

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's keys and values of all items that the step makes.

        Args:
            layer: Index of the layer.
            keys: ``[num_slots, num_kv_heads, head_dim]``, of any floating dtype, the items' one
                after the other in the step's order.
            values: The same shape.
        """
        assert self._slots is not None, "the step makes no output"
        layout = self._pool.layout
        expected = (len(self._slots), layout.num_kv_heads, layout.head_dim)
        assert keys.shape == values.shape == expected, (keys.shape, values.shape, expected)
        self._pool.write(layer, self._slots, keys, values)
        self._left.remove(layer)

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Return what each token of the step finds in its segment's output, all slots seen.

        Args:
            layer: Index of the layer.
            query: ``[num_tokens, num_qo_heads, head_dim]`` in the model's dtype.

        Returns:
            A new tensor of the query's shape and dtype.
        """
        assert self._attention is not None, "the step reads no output"
        return self._attention.run(layer, query)

    def check_written(self) -> None:
        """Verify that every layer was written."""
        assert not self._left, f"layers {sorted(self._left)} of what the step makes are not written"


class _Pool:
    """The memory of all outputs."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        shape = (layout.num_pages, layout.page_size, layout.num_kv_heads, layout.head_dim)
        # Zeros, since a kernel may multiply slots that it masks; untouched pages take no memory.
        self.keys = [
            torch.zeros(shape, dtype=layout.dtype, device=layout.device)
            for _ in range(layout.num_layers)
        ]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put one layer of outputs into their slots."""
        for pool, content in ((self.keys[layer], keys), (self.values[layer], values)):
            pool.flatten(0, 1).index_copy_(0, slots, content.to(pool.dtype))


class CrossAttentionManager(OutputStore):
    """Keeper of the keys and values that decoder layers make of encoder outputs.

    An output is pinned for each request from when it is made or found until the request closes;
    unpinned ones go when their room is needed, longest unused first.

    Args:
        resource_key: Its key among the model's resources.
        config: Shape of the outputs.
        deployment: Budget, dtype and device.
    """

    def __init__(
        self, resource_key: str, config: CrossAttentionConfig, deployment: Deployment
    ) -> None:
        self.resource_key = resource_key
        self.config = config
        self.is_reuse_enabled = deployment.enable_prefix_caching
        dtype: torch.dtype = getattr(torch, deployment.dtype)
        self.num_pages = _num_pages(config, deployment, dtype.itemsize)
        # Page 0 belongs to nobody, as in every paged cache.
        layout = KVLayout(
            num_layers=config.num_layers,
            num_pages=self.num_pages + 1,
            page_size=config.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=torch.device(deployment.device),
        )
        self._pool = _Pool(layout)
        self._backend = _backend(resource_key, config, layout, deployment)
        self._free = list(range(self.num_pages, 0, -1))
        self._outputs: OrderedDict[bytes, _Output] = OrderedDict()
        """Least recently used first."""
        self._plan: CrossAttentionPlan | None = None
        self._read: tuple[tuple[Segment, ...], tuple[bytes, ...], CrossAttentionPlan] | None = None
        """The last step that read, whose plan serves the same segments again."""
        self.num_hits = 0
        """Items whose output was found, counted once for each request."""

    @classmethod
    def build(
        cls, spec: CrossAttentionSpec, deployment: Deployment, resources: Mapping[str, Resource]
    ) -> Self:
        """Return a manager without outputs.

        Raises:
            UnsupportedError: If no attention backend can do it.
        """
        return cls(spec.resource_key, spec.config, deployment)

    # What the scheduler asks.

    def pin(self, item: Item) -> bool:
        """Keep an item's output for its request; returns whether it is there."""
        output = self._outputs.get(item.name)
        if output is None or not output.is_written:
            return False
        is_own = item.request_id in output.owners
        if output.is_stale and not is_own:
            return False
        self._outputs.move_to_end(item.name)
        if not is_own:
            output.owners.add(item.request_id)
            self.num_hits += 1
        return True

    def has_room(self, item: Item) -> bool:
        """Tell whether an output of this size fits beside what is pinned."""
        return self._num_pinned_pages() + self.config.num_pages(item.length) <= self.num_pages

    # A request's life.

    def ever_fits(self, opening: Opening) -> Refusal | None:
        """Take all requests: the pool holds the longest output that the model declares."""
        return None

    def close(self, request_id: str) -> None:
        """Unpin all that the request needed."""
        for name, output in list(self._outputs.items()):
            self._unpin(name, output, request_id)

    # A step's life.

    def admit(self, segments: tuple[Segment, ...], step: ResourceStep) -> Refusal | None:
        """Make room for what the step makes."""
        assert isinstance(step, CrossAttentionStep), type(step).__name__
        # What is made anew after a reset takes the old output's place.
        made = [item for item in step.made if not self._is_stale(item.name)]
        needed = sum(self.config.num_pages(item.length) for item in made)
        pinned = self._num_pinned_pages()
        if pinned + needed > self.num_pages:
            return Refusal(
                self.resource_key,
                f"{needed} pages of encoder output are needed; {pinned} of {self.num_pages} are "
                "in use",
            )
        self._evict(needed)
        for item in made:
            assert item.name not in self._outputs, f"{item} is made twice"
            pages = [self._free.pop() for _ in range(self.config.num_pages(item.length))]
            self._outputs[item.name] = _Output(item.length, pages)
        for item in step.made:
            self._outputs[item.name].owners.add(item.request_id)
        return None

    def rollback(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Give back the room of what will not be made."""
        assert isinstance(step, CrossAttentionStep), type(step).__name__
        for item in step.made:
            self._unpin(item.name, self._outputs[item.name], item.request_id)

    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> CrossAttentionPlan:
        """Return where outputs are put, or how the segments attend to them."""
        assert isinstance(step, CrossAttentionStep), type(step).__name__
        if not step.read:
            slots = send(self._slots_of(step.made), self._pool.layout.device)
            self._plan = CrossAttentionPlan(self._pool, None, slots)
            return self._plan
        last = self._read
        if last is not None and last[0] is segments and last[1] == step.read:
            return last[2]
        plan = CrossAttentionPlan(self._pool, self._attention(segments, step.read), None)
        self._read = (segments, step.read, plan)
        return plan

    def plan_fixed(
        self,
        size: int,
        segments: tuple[Segment, ...],
        step: ResourceStep,
        plans: Mapping[str, Any],
        ahead: int = 0,
    ) -> CrossAttentionPlan | None:
        """Return how single tokens attend to outputs, which are the same ahead."""
        assert isinstance(step, CrossAttentionStep), type(step).__name__
        if step.made or any(segment.span != 1 for segment in segments):
            return None
        kv_plan = self._kv_plan([1] * size, self._outputs_of(segments, step.read))
        # One token that stands last sees all slots, causal or not.
        attention = self._backend.plan_fixed(kv_plan, (True,) * size)
        return None if attention is None else CrossAttentionPlan(self._pool, attention, None)

    def commit(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Let what was made be found."""
        assert isinstance(step, CrossAttentionStep), type(step).__name__
        if step.made:
            assert self._plan is not None, "a step commits before it is planned"
            self._plan.check_written()
        for item in step.made:
            output = self._outputs[item.name]
            output.is_written, output.is_stale = True, False
            self._outputs.move_to_end(item.name)
        self._plan = None

    def counters(self) -> Mapping[str, int]:
        """Return how many items' outputs were found."""
        return {"num_encoder_hits": self.num_hits}

    def reset(self) -> int:
        """Forget all outputs, those that running requests need once these have closed."""
        idle = [name for name, output in self._outputs.items() if not output.owners]
        for name in idle:
            self._drop(name)
        for output in self._outputs.values():
            output.is_stale = output.is_written
        return len(idle)

    def check(self) -> None:
        """Verify that every page is free or in one output, and that outputs are whole."""
        held = [page for output in self._outputs.values() for page in output.pages]
        pages = sorted([*held, *self._free])
        assert pages == list(range(1, self.num_pages + 1)), (len(held), len(self._free))
        for name, output in self._outputs.items():
            expected = self.config.num_pages(output.length)
            assert len(output.pages) == expected, (name, len(output.pages), expected)
            assert output.owners or (output.is_written and not output.is_stale), (
                f"output {name.hex()} is kept for nobody"
            )
            assert output.owners or self.is_reuse_enabled, "an output is kept without reuse"

    def _slots_of(self, items: Sequence[Item]) -> npt.NDArray[np.int64]:
        """Return where items' outputs lie, slot by slot."""
        size = self.config.page_size
        own = []
        for item in items:
            pages = np.array(self._outputs[item.name].pages, np.int64)
            slots = pages[:, None] * size + np.arange(size)
            own.append(slots.flatten()[: item.length])
        return np.concatenate(own or [np.empty(0, np.int64)])

    def _attention(self, segments: tuple[Segment, ...], names: tuple[bytes, ...]) -> AttentionPlan:
        """Return the attention of segments over the outputs of these names."""
        spans: list[int] = []
        outputs: list[_Output] = []
        own = self._outputs_of(segments, names)
        for segment, output in zip(segments, own, strict=True):
            # Backends take no more new tokens than slots; rows do not see each other here.
            for begin in range(0, segment.span, output.length):
                spans.append(min(output.length, segment.span - begin))
                outputs.append(output)
        return self._backend.plan(self._kv_plan(spans, outputs), (False,) * len(spans))

    def _outputs_of(self, segments: tuple[Segment, ...], names: tuple[bytes, ...]) -> list[_Output]:
        """Return the output that each segment attends to."""
        assert len(names) == len(segments), f"{len(names)} outputs, {len(segments)} segments"
        outputs = [self._outputs[name] for name in names]
        for segment, output in zip(segments, outputs, strict=True):
            assert segment.request_id in output.owners, f"{segment} reads what it has not pinned"
        return outputs

    def _kv_plan(self, spans: Sequence[int], outputs: Sequence[_Output]) -> KVPlan:
        """Return where outputs lie, one a segment; segments beyond them have the page of nobody."""
        count, num_pages = len(outputs), max((len(o.pages) for o in outputs), default=1)
        table = np.zeros((len(spans), num_pages), np.int32)
        kv_lens = np.ones(len(spans), np.int32)
        for row, output in zip(table, outputs, strict=False):
            row[: len(output.pages)] = output.pages
        kv_lens[:count] = [output.length for output in outputs]
        indptr = np.zeros(len(spans) + 1, np.int32)
        np.cumsum(spans, out=indptr[1:])
        return KVPlan(
            layout=self._pool.layout,
            keys=self._pool.keys,
            values=self._pool.values,
            qo_lens=np.array(spans, np.int32),
            qo_indptr=indptr,
            kv_lens=kv_lens,
            page_table=table,
            slots=torch.empty(0, dtype=torch.int64, device=self._pool.layout.device),
        )

    def _num_pinned_pages(self) -> int:
        return sum(len(output.pages) for output in self._outputs.values() if output.owners)

    def _is_stale(self, name: bytes) -> bool:
        output = self._outputs.get(name)
        return output is not None and output.is_stale

    def _evict(self, needed: int) -> None:
        """Drop outputs that nobody needs until ``needed`` pages are free."""
        for name, output in list(self._outputs.items()):
            if len(self._free) >= needed:
                return
            if not output.owners:
                self._drop(name)

    def _unpin(self, name: bytes, output: _Output, request_id: str) -> None:
        if request_id not in output.owners:
            return
        output.owners.discard(request_id)
        is_kept = output.is_written and not output.is_stale and self.is_reuse_enabled
        if not output.owners and not is_kept:
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        self._free += self._outputs.pop(name).pages
        # The pages may soon be another output's.
        self._read = None


def _num_pages(config: CrossAttentionConfig, deployment: Deployment, itemsize: int) -> int:
    """Return the pages of the pool: at least those of one output."""
    slot_nbytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    longest = config.num_pages(config.max_length)
    if deployment.encoder_cache_tokens:
        return max(deployment.encoder_cache_tokens // config.page_size, longest)
    affordable = _default_nbytes(deployment) // slot_nbytes // config.page_size
    return max(min(affordable, _PER_REQUEST * deployment.max_num_seqs * longest), longest)


def _default_nbytes(deployment: Deployment) -> int:
    device = torch.device(deployment.device)
    if device.type != "cuda":
        return DEFAULT_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory * DEFAULT_SHARE)


def _backend(
    resource_key: str, config: CrossAttentionConfig, layout: KVLayout, deployment: Deployment
) -> AttentionBackend:
    attention = AttentionConfig(
        kv_cache=resource_key,
        num_qo_heads=config.num_qo_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        layers=(LayerAttention(),) * config.num_layers,
    )
    return pick_backend(attention, layout, deployment.attention_backend)[1]
