"""Pages that leave a CUDA device and come back, while steps run."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.kv import transfer
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.kv.prefix import Names
from mstar.engine.resources.kv.stream import StreamKeys
from mstar.engine.resources.kv.tiers.base import Arrived, Leaving, host_memory
from mstar.engine.resources.sampler.config import SamplingParams
from tests.gpu.likely import TOLERANCE, Result, assert_likely, engine, prompts, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_STAGE_PAGES = 3
MAX_LEN = 512
SHAPES = {
    "tiny pages": (1, 2, 12, 1, 1, 4),
    "pages of odd size": (3, 2, 12, 5, 1, 3),
    "pages of 2 MiB": (32, 2, 12, 16, 8, 128),
    "offsets beyond 32 bits": (2, 2, 40_000, 64, 4, 64),
}


class Copies:
    """Pages, places in host memory, and what must be in each: a pattern plus a number."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.rng = random.Random(0)
        self.memory = torch.zeros(tuple(shape), dtype=torch.bfloat16, device="cuda")
        one = self.memory[:, :, 0]
        # Whole numbers up to 256 are exact in bfloat16.
        self.pattern = (torch.arange(one.numel(), device="cuda") % 101).view(one.shape).bfloat16()
        self.staged = transfer.Staged(self.memory)
        num_pages = shape[2]
        self.pages = dict.fromkeys(range(num_pages - 10, num_pages), 0)
        for page in self.pages:
            self.fill(page, 0)
        nbytes = one.numel() * 2
        self.images = [host_memory((nbytes,), is_pinned=True) for _ in range(4)]
        self.unpinned = np.empty(nbytes, np.uint8)
        self.places: dict[int, int] = {}
        self.arriving: dict[int, Arrived] = {}
        self.unsettled: set[int] = set()

    def fill(self, page: int, number: int) -> None:
        """What a step does: it is queued, and nobody waits for it."""
        self.memory[:, :, page].copy_(self.pattern + number)
        self.pages[page] = number

    def arrive(self, place: int) -> None:
        if place in self.arriving:
            self.arriving.pop(place)()

    def settle(self) -> None:
        self.staged.settle()
        self.unsettled.clear()

    def compute(self) -> None:
        self.settle()
        torch.cuda._sleep(self.rng.choice([0, 100_000, 2_000_000]))
        for page in self.rng.sample(sorted(self.pages), 3):
            self.fill(page, self.rng.randrange(100))

    def idle(self) -> list[int]:
        return sorted(self.pages.keys() - self.unsettled)

    def down(self) -> None:
        pages = self.rng.sample(self.idle(), min(len(self.idle()), self.rng.randrange(1, 8)))
        for page, leaving in zip(pages, self.staged.read(pages), strict=True):
            assert isinstance(leaving, Leaving)
            place = self.rng.randrange(len(self.images))
            self.arrive(place)
            self.arriving[place] = leaving.copy_to(self.images[place])
            self.places[place] = self.pages[page]

    def up(self) -> None:
        if not self.places:
            return
        place, page = self.rng.choice(sorted(self.places)), self.rng.choice(self.idle())
        self.arrive(place)
        image = self.images[place]
        if self.rng.random() < 0.2:
            # As from a file: the memory is used again at once.
            self.unpinned[:] = image
            image = self.unpinned
        self.staged.write(page, image)
        self.unpinned[:] = 255
        self.unsettled.add(page)
        if len(self.unsettled) == NUM_STAGE_PAGES:
            # It has settled by itself.
            self.unsettled.clear()
        self.pages[page] = self.places[place]

    def check(self) -> None:
        self.settle()
        for page, number in self.pages.items():
            assert torch.equal(self.memory[:, :, page], self.pattern + number), (page, number)
        for place, number in self.places.items():
            self.arrive(place)
            image = torch.from_numpy(self.images[place]).view(torch.bfloat16)
            expected = (self.pattern + number).cpu().flatten()
            assert torch.equal(image, expected), (place, number)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_copies_either_way_meet_nothing_half_done(
    shape: tuple[int, ...], has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_nbytes = int(np.prod(shape)) // shape[2] * 2
    monkeypatch.setattr(transfer, "_STAGE_NBYTES", NUM_STAGE_PAGES * page_nbytes)
    if not has_kernels:
        monkeypatch.setattr(transfer, "_load", lambda: None)
    copies = Copies(shape)
    acts: list[Callable[[], object]] = [copies.compute, copies.down, copies.up, copies.settle]
    for number in range(400):
        copies.rng.choices(acts, [3, 4, 8, 1])[0]()
        if number % 50 == 49:
            copies.check()
    copies.check()
    copies.staged.close()


def test_nobody_waits_for_the_device_when_pages_leave_or_come_back() -> None:
    copies = Copies(SHAPES["pages of 2 MiB"])

    def move() -> list[Arrived]:
        arrived = []
        for place, leaving in enumerate(copies.staged.read([2, 3])):
            assert isinstance(leaving, Leaving)
            arrived.append(leaving.copy_to(copies.images[place]))
        copies.staged.write(4, copies.images[2])
        copies.staged.settle()
        return arrived

    # What is allocated is allocated now.
    move()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    # About half a second; the copies take less than a millisecond.
    torch.cuda._sleep(1_000_000_000)
    copies.fill(3, 7)
    busy.record()
    _, arrived = move()
    assert not busy.query(), "the CPU waited for what was queued before"
    arrived()
    assert busy.query(), "a page left before what was queued had been written to it"
    image = torch.from_numpy(copies.images[1]).view(torch.bfloat16)
    assert torch.equal(image, (copies.pattern + 7).cpu().flatten())


# Layers, heads, page size and pages: of 64 KiB each, and of 1 MiB.
POOLS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "small pages": (
        {"num_hidden_layers": 2, "num_key_value_heads": 4},
        {"page_size": 16, "num_pages": 60},
    ),
    "big pages": (
        {"num_hidden_layers": 4, "num_key_value_heads": 8},
        {"page_size": 64, "num_pages": 20},
    ),
}
TIERS = {
    "host": {"host_cache_bytes": 1 << 30},
    "host and disk": {"host_cache_bytes": 12 << 20, "disk_cache_bytes": 4 << 30},
    "disk": {"disk_cache_bytes": 4 << 30},
}


def page_nbytes(pool: str) -> int:
    shape, numbers = POOLS[pool]
    heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
    return 2 * heads * numbers["page_size"] * 128 * 2


def with_tiers(pool: str, tiers: str, folder: Path, **numbers: Any) -> EngineCore:
    shape, own = POOLS[pool]
    given = own | TIERS[tiers] | {"disk_cache_dir": str(folder), "max_model_len": MAX_LEN}
    return engine("cuda", "bfloat16", 128, dict(shape), **(given | numbers))


def without_tiers(pool: str, **numbers: Any) -> EngineCore:
    shape, own = POOLS[pool]
    given = own | {"num_pages": 64_000 // own["page_size"], "max_model_len": MAX_LEN}
    return engine("cuda", "bfloat16", 128, dict(shape), **(given | numbers))


def kv_of(core: EngineCore) -> KVManager:
    (manager,) = (r for r in core._runner.resources.values() if isinstance(r, KVManager))
    return manager


def asked_of(seed: int, count: int) -> list[list[int]]:
    """Return prompts with beginnings in common, far more of them than a pool holds."""
    rng = random.Random(seed)
    stems = prompts(seed, [400] * 6)
    tails = prompts(seed + 1, [rng.randrange(1, 60) for _ in range(count)])
    return [rng.choice(stems)[: rng.randrange(40, 400)] + tail for tail in tails]


class Watch:
    """Notes what pages held when they left and when they had come back, behind no one's back.

    The copies are queued where steps are: nobody waits for them before the end.
    """

    def __init__(self, manager: KVManager) -> None:
        offload = manager._offload
        assert offload is not None
        self._memory = manager.cache.memory
        self._evict, self._load = offload.evict, offload._load
        self._restore = offload.restore
        self.gone: dict[bytes, list[Tensor]] = {}
        self.back: list[tuple[bytes, Tensor]] = []
        self._loaded: list[tuple[bytes, int]] = []
        self.num_while_leaving = 0
        """Restores in which pages left, too."""
        offload.evict = self.evict  # type: ignore[method-assign]
        offload._load = self.load  # type: ignore[method-assign]
        offload.restore = self.restore  # type: ignore[method-assign]

    def copy(self, page: int) -> Tensor:
        return self._memory[:, :, page].clone()

    def evict(self, pages: Sequence[int]) -> list[Names]:
        copies = [self.copy(page) for page in pages]
        names = self._evict(pages)
        for own, held in zip(names, copies, strict=True):
            if own.key is not None:
                self.gone.setdefault(own.key, []).append(held)
        return names

    def load(self, key: bytes, num_slots: int, page: int) -> bool:
        is_loaded = self._load(key, num_slots, page)
        if is_loaded:
            self._loaded.append((key, page))
        return is_loaded

    def restore(self, keys: StreamKeys, limit: int) -> None:
        num_gone = sum(map(len, self.gone.values()))
        self._restore(keys, limit)
        if self._loaded and sum(map(len, self.gone.values())) > num_gone:
            self.num_while_leaving += 1
        self.back += [(key, self.copy(page)) for key, page in self._loaded]
        self._loaded.clear()

    def check(self) -> None:
        """Each page came back as it left, at one of the times that it did."""
        for key, found in self.back:
            assert any(torch.equal(found, held) for held in self.gone[key]), key.hex()


@pytest.mark.parametrize("stage", ["as it is", "of three pages"])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("pool", POOLS)
def test_traffic_under_pressure_gets_back_what_it_had(
    pool: str, tiers: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come while others generate, steps are launched ahead, and some are aborted."""
    if stage == "of three pages":
        monkeypatch.setattr(transfer, "_STAGE_NBYTES", NUM_STAGE_PAGES * page_nbytes(pool))
    core = with_tiers(pool, tiers, tmp_path, max_num_seqs=4, max_num_batched_tokens=256)
    watch = Watch(kv_of(core))
    rng = random.Random(5)
    asked = asked_of(20, 60)
    wanted = [rng.randrange(2, 24) for _ in asked]
    results: list[Result] = [[] for _ in asked]
    aborted: set[int] = set()
    coming = list(range(len(asked)))
    num_steps = 0
    while coming or core.has_work:
        while coming and (not core.has_work or rng.random() < 0.3):
            place = coming.pop(0)
            params = SamplingParams(
                max_tokens=wanted[place], temperature=0.0, logprobs=20, ignore_eos=True
            )
            core.add_request(
                PreparedRequest(
                    request_id=str(place), token_ids=asked[place], params=params, root=core.root
                )
            )
            if rng.random() < 0.1:
                aborted.add(place)
        for output in core.step():
            assert output.error is None, output.error
            results[int(output.request_id)] += output.logprobs or []
        num_steps += 1
        if num_steps % 11 == 0:
            core.check()
        for place in sorted(aborted):
            if 1 < len(results[place]) < wanted[place] - 2:
                core.abort(str(place))
    core.check()
    torch.cuda.synchronize()
    assert len(watch.back) > 100 if pool == "small pages" else len(watch.back) > 20
    assert watch.num_while_leaving > 3
    watch.check()
    (recorder,) = core._runner._recorders.values()
    assert recorder.num_ahead > 0
    for place, result in enumerate(results):
        assert len(result) == wanted[place] or place in aborted
    reference = without_tiers(pool, overlap=False)
    assert_likely(reference, asked, results, TOLERANCE["bfloat16"])
    core.close()


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("pool", POOLS)
def test_answers_are_bit_for_bit_those_of_a_pool_that_holds_everything(
    pool: str, tiers: str, tmp_path: Path
) -> None:
    """One request at a time: what is reused, and so what is computed, is the same."""
    small, large = with_tiers(pool, tiers, tmp_path), without_tiers(pool)
    watch = Watch(kv_of(small))
    for place, ids in enumerate(asked_of(30, 40)):
        params = {"max_tokens": 2 + place % 20}
        assert run(small, [ids], **params) == run(large, [ids], **params), place
        assert small.stats().cached_tokens == large.stats().cached_tokens, place
    assert kv_of(large).pool.num_evictions == 0
    watch.check()
    assert len(watch.back) > 20
    small.close()


def test_pages_outlive_the_engine_on_disk(tmp_path: Path) -> None:
    (ids,) = prompts(40, [300])
    # Not so many that a page fills up: where it is indexed already, that page is read from then on.
    wanted = {"max_tokens": 4}
    first = with_tiers("small pages", "host and disk", tmp_path)
    before = run(first, [ids], **wanted)
    first.close()
    second = with_tiers("small pages", "host and disk", tmp_path)
    after = run(second, [ids], **wanted)
    assert second.stats().cached_tokens == 288
    large = without_tiers("small pages")
    assert run(large, [ids], **wanted) == before
    assert run(large, [ids], **wanted) == after
    second.close()
