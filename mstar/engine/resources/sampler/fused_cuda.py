"""Every row's token in one Triton launch: edits, rules and draw, a row to a program.

No row is sorted: the value that a rule cuts at is found by weighing, in each pass over the row,
what lies above several values between the bounds known so far. A row is read some ten times where
rules apply, mostly from the cache, and once where its most likely token is taken.

Weights are float32, sums of them float64, and the order of all sums depends on the vocabulary only:
a row's token does not depend on its neighbours, nor on how many there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Logits that the kernel takes."""
NUM_CHUNKS = 1024
"""Pieces of a row whose weights are summed before one of them is drawn."""

_LANES = 2048
_TILE = 8192
_UNROLL = 4
_NUM_PIVOTS = 8
_NUM_WARPS = 16


def choose(
    logits: Tensor,
    reals: Tensor,
    wholes: Tensor,
    step: Tensor,
    edits: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, float32 ``[B]``, and its token, int64 ``[B]``.

    A row whose largest logit is not finite, or that has a NaN, gets the token -1.

    Args:
        logits: ``[B, vocab_size]``, contiguous.
        reals: float64 ``[B, 6]``: 1 / temperature (0 takes the most likely token), top_p, min_p,
            repetition, presence and frequency penalty.
        wholes: int64 ``[B, 4]``: top_k (the vocabulary's size keeps all), row of ``seen`` (-1:
            no penalties), and where the row's places begin and end.
        step: int64 ``[3, B]``: the bits of a float64 random number in [0, 1), how many tokens
            are generated, and the token to count in ``seen`` first (-1: none).
        edits: ``None``: no row has penalties or places. Else ``seen``, int32
            ``[num_slots, vocab_size]``, twice a token's count in the output, plus 1 if it is in
            the prompt and that matters; and of all places the id, int32 ``[P]``, what is added,
            float32 ``[P]``, and the number of generated tokens below which it is impossible,
            int64 ``[P]``.
    """
    num_rows, width = logits.shape
    best = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    masses = logits.new_empty((num_rows, NUM_CHUNKS), dtype=torch.float32)
    ties = logits.new_empty((num_rows, NUM_CHUNKS), dtype=torch.int32)
    work = masses if edits is None else logits.new_empty((num_rows, width), dtype=torch.float32)
    room = triton.cdiv(width, 4 * _LANES) * 4 * _LANES
    spare = logits.new_empty((num_rows, room), dtype=torch.float32)
    chunk = max(triton.next_power_of_2(triton.cdiv(width, NUM_CHUNKS)), 32)
    _choose_kernel[(num_rows,)](
        best,
        tokens,
        masses,
        ties,
        spare,
        work,
        logits,
        reals,
        wholes,
        step,
        *((ties, ties, masses, step) if edits is None else edits),
        num_rows,
        width,
        HAS_EDITS=edits is not None,
        CHUNKS=NUM_CHUNKS,
        CHUNK=chunk,
        ROWS=min(NUM_CHUNKS, max(_TILE // chunk, 1)),
        LANES=_LANES,
        UNROLL=_UNROLL,
        PIVOTS=_NUM_PIVOTS,
        num_warps=_NUM_WARPS,
    )
    return best, tokens


@triton.jit
def _key(x):
    """Return the integer that stands where ``x`` stands among float32 numbers; own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unkey(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _read(raw, work, column, inside, is_edited, HAS_EDITS: tl.constexpr):
    """Return a row's logits as float32, -inf outside."""
    if HAS_EDITS:
        plain = tl.load(raw + column, mask=inside & (is_edited == 0), other=-float("inf"))
        edited = tl.load(work + column, mask=inside & (is_edited != 0), other=-float("inf"))
        return tl.where(is_edited != 0, edited, plain.to(tl.float32))
    return tl.load(raw + column, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def _edit(  # noqa: PLR0913, PLR0917 - a row's whole state
    work,
    raw,
    seen,
    ids,
    added,
    until,
    width,
    slot,
    new_id,
    num_generated,
    begin,
    end,
    repetition,
    presence,
    frequency,
    BLOCK: tl.constexpr,
):
    """Write the row's logits after penalties, bias and bans to ``work``."""
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(raw + column, mask=inside, other=0.0).to(tl.float32)
        has_slot = inside & (slot >= 0)
        at = seen + slot * width + column
        code = tl.load(at, mask=has_slot, other=0)
        is_new = column == new_id
        code = tl.where(is_new, code + 2, code)
        tl.store(at, code, mask=has_slot & is_new)
        count = (code >> 1).to(tl.float32)
        turned = tl.where(x > 0, tl.div_rn(x, repetition + 0 * x), x * repetition)
        taken = tl.where(count > 0, presence, 0.0) + frequency * count
        x = tl.where(code > 0, turned - taken, x)
        tl.store(work + column, x, mask=inside)
    tl.debug_barrier()
    for start in range(begin, end, 256):
        place = start + tl.arange(0, 256)
        inside = place < end
        column = tl.load(ids + place, mask=inside, other=0)
        x = tl.load(work + column, mask=inside, other=0.0)
        x += tl.load(added + place, mask=inside, other=0.0)
        is_banned = num_generated < tl.load(until + place, mask=inside, other=0)
        tl.store(work + column, tl.where(is_banned, -float("inf"), x), mask=inside)
    tl.debug_barrier()


@triton.jit
def _survey(
    raw,
    work,
    width,
    is_edited,
    HAS_EDITS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return the largest logit, NaN if there is one, its first id, and the smallest finite one."""
    lane = tl.arange(0, LANES)
    top = tl.full([LANES], -float("inf"), tl.float32)
    low = tl.full([LANES], float("inf"), tl.float32)
    first = tl.zeros([LANES], tl.int32)
    bad = tl.zeros([LANES], tl.int32)
    for start in range(0, width, LANES * UNROLL):
        for part in tl.static_range(UNROLL):
            column = start + part * LANES + lane
            x = _read(raw, work, column, column < width, is_edited, HAS_EDITS)
            first = tl.where(x > top, column, first)
            top = tl.where(x > top, x, top)
            low = tl.where((x < low) & (x > -float("inf")), x, low)
            bad |= (x != x).to(tl.int32)  # noqa: PLR0124 - true of NaN only
    best = tl.max(top, 0)
    token = tl.min(tl.where(top == best, first, width), 0)
    best = tl.where(tl.max(bad, 0) > 0, float("nan"), best)
    return best, token, tl.min(low, 0)


@triton.jit
def _pivots(floor, ceiling, num_rounds, PIVOTS: tl.constexpr):
    """Return numbers from ``floor`` on and below ``ceiling``, ascending, ``floor`` the first."""
    index = tl.arange(0, PIVOTS)
    low_key = _key(floor).to(tl.int64)
    width_key = _key(ceiling).to(tl.int64) - low_key
    keyed = _unkey((low_key + width_key * index // PIVOTS).to(tl.int32))
    spaced = floor + (ceiling - floor) * (index.to(tl.float32) / PIVOTS)
    # Dividing by value suits logits; dividing what float32 can represent is sure to end.
    by_value = (num_rounds < 6) & (ceiling - floor < 1e30)
    return tl.where(by_value, spaced, keyed)


@triton.jit
def _take(  # noqa: PLR0913, PLR0917 - a row's whole state
    spare, raw, work, column, slot, had, row_end, is_edited, HAS_EDITS: tl.constexpr
):
    """Return logits of the row, or those that were kept of it, -inf where there are none."""
    x = _read(raw, work, column, column < row_end, is_edited, HAS_EDITS)
    kept = tl.load(spare + column, mask=(slot < had) & (column >= 0), other=-float("inf"))
    return tl.maximum(x, kept)


@triton.jit
def _keep(spare, lane, x, num_kept, LANES: tl.constexpr):
    """Write the fours of logits with one above -inf behind those that were kept before."""
    is_kept = tl.max(x, 2, keep_dims=True) > -float("inf")
    tl.store(spare + num_kept * LANES + lane, x, mask=is_kept & (lane >= 0))
    return num_kept + is_kept.to(tl.int32)


@triton.jit
def _tally(x, pivots, bounds, reached, least, most):
    """Add logits between the bounds to the weight at and above each pivot, and to the extremes."""
    floor, ceiling, best, scale = bounds
    weight = tl.exp((x - best) * scale)
    is_between = (x >= floor) & (x < ceiling)
    x = tl.where(is_between, x, -float("inf"))
    reached += tl.where(x >= pivots[:, None, None], weight, 0.0)
    least = tl.minimum(least, tl.where(is_between, x, float("inf")))
    return reached, least, tl.maximum(most, x), x


@triton.jit
def _weigh(  # noqa: PLR0913, PLR0917 - a row's whole state
    spare,
    raw,
    work,
    width,
    is_edited,
    pivots,
    bounds,
    num_kept,
    num_rounds,
    HAS_EDITS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Go once over the logits between the bounds.

    From the second round on the fours with one of them are written to ``spare``, and from the
    third on read from there. Each lane reads what it wrote itself, so that nobody waits.
    """
    LANES: tl.constexpr = GROUPS * 4
    lane = tl.arange(0, GROUPS)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    is_listed = num_rounds >= 2
    had = tl.where(is_listed, num_kept, 0)
    row_end = tl.where(is_listed, 0, width)
    end = tl.maximum(row_end, tl.max(tl.max(tl.max(had, 2), 1), 0) * LANES)
    num_kept = tl.zeros([1, GROUPS, 1], tl.int32)
    reached = tl.zeros([PIVOTS, GROUPS, 4], tl.float32)
    least = tl.full([1, GROUPS, 4], float("inf"), tl.float32)
    most = tl.full([1, GROUPS, 4], -float("inf"), tl.float32)
    for start in range(0, end, LANES * 4):
        # All four are read before anything is written where they might lie.
        at = start + lane
        slot = start // LANES
        x0 = _take(spare, raw, work, at, slot, had, row_end, is_edited, HAS_EDITS)
        at += LANES
        x1 = _take(spare, raw, work, at, slot + 1, had, row_end, is_edited, HAS_EDITS)
        at += LANES
        x2 = _take(spare, raw, work, at, slot + 2, had, row_end, is_edited, HAS_EDITS)
        at += LANES
        x3 = _take(spare, raw, work, at, slot + 3, had, row_end, is_edited, HAS_EDITS)
        reached, least, most, x0 = _tally(x0, pivots, bounds, reached, least, most)
        reached, least, most, x1 = _tally(x1, pivots, bounds, reached, least, most)
        reached, least, most, x2 = _tally(x2, pivots, bounds, reached, least, most)
        reached, least, most, x3 = _tally(x3, pivots, bounds, reached, least, most)
        if num_rounds >= 1:
            num_kept = _keep(spare, lane, x0, num_kept, LANES)
            num_kept = _keep(spare, lane, x1, num_kept, LANES)
            num_kept = _keep(spare, lane, x2, num_kept, LANES)
            num_kept = _keep(spare, lane, x3, num_kept, LANES)
    weights = tl.sum(tl.sum(reached, 2).to(tl.float64), 1)
    smallest = tl.min(tl.min(tl.min(least, 2), 1), 0)
    largest = tl.max(tl.max(tl.max(most, 2), 1), 0)
    return weights, smallest, largest, num_kept


@triton.jit
def _cut(  # noqa: PLR0913, PLR0917 - a row's whole state
    spare,
    raw,
    work,
    width,
    is_edited,
    best,
    low,
    scale,
    goal,
    share,
    HAS_EDITS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Find the largest logit with enough weight at and above it.

    A logit ``x`` weighs ``exp((x - best) * scale)``, 1 where ``scale`` is 0. Enough is ``goal``,
    and at most ``share`` of the weight of all from ``low`` on.

    Returns:
        That logit, the weight above it, and how much was enough.
    """
    # Bounds: at ``floor`` and above there is enough, at ``ceiling`` and above there is not.
    floor = low
    ceiling = _unkey(_key(best) + 1)
    above = 0.0 * share
    enough = goal
    num_kept = tl.zeros([1, GROUPS, 1], tl.int32)
    num_rounds = 0
    is_open = 1
    while is_open != 0:
        pivots = _pivots(floor, ceiling, num_rounds, PIVOTS)
        weights, smallest, largest, num_kept = _weigh(
            spare,
            raw,
            work,
            width,
            is_edited,
            pivots,
            (floor, ceiling, best, scale),
            num_kept,
            num_rounds,
            HAS_EDITS,
            GROUPS,
            PIVOTS,
        )
        weights += above
        if num_rounds == 0:
            enough = tl.minimum(goal, share * tl.max(weights, 0))
        # Sums in another order must not take back what was found before.
        has_enough = (weights >= enough) | (pivots <= floor)
        above = tl.maximum(above, tl.max(tl.where(has_enough, 0.0, weights), 0))
        floor = tl.maximum(tl.max(tl.where(has_enough, pivots, floor), 0), smallest)
        ceiling = tl.min(tl.where(has_enough, ceiling, pivots), 0)
        ceiling = tl.minimum(ceiling, _unkey(_key(largest) + 1))
        gap = _key(ceiling).to(tl.int64) - _key(floor).to(tl.int64)
        is_open = ((smallest < largest) & (gap > 1)).to(tl.int32)
        num_rounds += 1
    return floor, above, enough


@triton.jit
def _draw(  # noqa: PLR0913, PLR0917 - a row's whole state
    masses,
    ties,
    raw,
    work,
    width,
    is_edited,
    best,
    scale,
    cut,
    room,
    min_p,
    uniform,
    HAS_EDITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Draw among logits above ``cut``, and the first ``room`` equal to it."""
    for start in range(0, CHUNKS, ROWS):
        chunk = start + tl.arange(0, ROWS)
        column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = _read(raw, work, column, column < width, is_edited, HAS_EDITS)
        weight = tl.exp((x - best) * scale)
        weight = tl.where((x > cut) & (weight >= min_p), weight, 0.0)
        tl.store(masses + chunk, tl.sum(weight, 1))
        tl.store(ties + chunk, tl.sum((x == cut).to(tl.int32), 1))
    tl.debug_barrier()
    index = tl.arange(0, CHUNKS)
    num_ties = tl.load(ties + index)
    earlier = tl.cumsum(num_ties, 0) - num_ties
    tie_weight = tl.exp((cut - best) * scale)
    tie_weight = tl.where(tie_weight >= min_p, tie_weight, 0.0).to(tl.float64)
    num_kept = tl.minimum(tl.maximum(room - earlier, 0), num_ties)
    mass = tl.load(masses + index).to(tl.float64) + num_kept.to(tl.float64) * tie_weight
    chosen, inside = _search(mass, index, uniform, CHUNKS)
    before = tl.sum(tl.where(index == chosen, earlier, 0), 0)

    place = tl.arange(0, CHUNK)
    column = chosen * CHUNK + place
    x = _read(raw, work, column, column < width, is_edited, HAS_EDITS)
    weight = tl.exp((x - best) * scale)
    weight = tl.where(weight >= min_p, weight, 0.0)
    is_tie = (x == cut).to(tl.int32)
    rank = before + tl.cumsum(is_tie, 0) - is_tie
    is_kept = (x > cut) | ((is_tie != 0) & (rank < room))
    token, _ = _search(tl.where(is_kept, weight, 0.0).to(tl.float64), place, inside, CHUNK)
    return chosen * CHUNK + token


@triton.jit
def _search(mass, index, uniform, SIZE: tl.constexpr):
    """Return where ``uniform`` of the sum falls, and how far into that place, in [0, 1]."""
    reached = tl.cumsum(mass, 0)
    total = tl.max(reached, 0)
    target = tl.minimum(uniform * total, total * (1 - 2.0**-52))
    has_mass = mass > 0
    place = tl.min(tl.where(has_mass & (reached > target), index, SIZE), 0)
    last = tl.max(tl.where(has_mass, index, 0), 0)
    place = tl.minimum(place, last)
    own = tl.sum(tl.where(index == place, mass, 0.0), 0)
    upper = tl.sum(tl.where(index == place, reached, 0.0), 0)
    inside = (target - (upper - own)) / own
    return place, tl.minimum(tl.maximum(inside, 0.0), 1.0)


@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    best_out,
    tokens_out,
    masses,
    ties,
    spare,
    work,
    raw,
    reals,
    wholes,
    step,
    seen,
    ids,
    added,
    until,
    num_rows,
    width,
    HAS_EDITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    raw += row * width
    masses += row * CHUNKS
    ties += row * CHUNKS
    spare += row * (tl.cdiv(width, 4 * LANES) * (4 * LANES))
    scale = tl.load(reals + row * 6).to(tl.float32)
    is_edited = 0
    if HAS_EDITS:
        work += row * width
        slot = tl.load(wholes + row * 4 + 1)
        begin = tl.load(wholes + row * 4 + 2).to(tl.int32)
        end = tl.load(wholes + row * 4 + 3).to(tl.int32)
        is_edited = ((slot >= 0) | (begin < end)).to(tl.int32)
        if is_edited != 0:
            _edit(
                work,
                raw,
                seen,
                ids,
                added,
                until,
                width,
                slot,
                tl.load(step + 2 * num_rows + row).to(tl.int32),
                tl.load(step + num_rows + row),
                begin,
                end,
                tl.load(reals + row * 6 + 3).to(tl.float32),
                tl.load(reals + row * 6 + 4).to(tl.float32),
                tl.load(reals + row * 6 + 5).to(tl.float32),
                LANES,
            )
    best, token, low = _survey(raw, work, width, is_edited, HAS_EDITS, LANES, UNROLL)
    is_good = (best > -float("inf")) & (best < float("inf"))
    if is_good & (scale > 0):
        top_k = tl.load(wholes + row * 4)
        top_p = tl.load(reals + row * 6 + 1)
        cut = low
        room = width
        above = 0.0 * top_p
        enough = above
        for rule in range(2):
            if tl.where(rule == 0, top_k < width, top_p < 1):
                cut, above, enough = _cut(
                    spare,
                    raw,
                    work,
                    width,
                    is_edited,
                    best,
                    cut,
                    tl.where(rule == 0, 0.0, scale),
                    tl.where(rule == 0, top_k.to(tl.float64), float("inf")),
                    tl.where(rule == 0, 1.0, top_p),
                    HAS_EDITS,
                    LANES // 4,
                    PIVOTS,
                )
        if top_p < 1:
            weight = tl.exp((cut - best) * scale).to(tl.float64)
            # Where the weight of one is next to nothing, so is that of all, and any number will do.
            wanted = tl.minimum(tl.maximum((enough - above) / weight, 1.0), 1e9)
            room = tl.ceil(wanted).to(tl.int32)
        token = _draw(
            masses,
            ties,
            raw,
            work,
            width,
            is_edited,
            best,
            scale,
            cut,
            room,
            tl.load(reals + row * 6 + 2).to(tl.float32),
            tl.load(step + row).to(tl.float64, bitcast=True),
            HAS_EDITS,
            CHUNKS,
            CHUNK,
            ROWS,
        )
    tl.store(best_out + row, best)
    tl.store(tokens_out + row, tl.where(is_good, token, -1).to(tl.int64))
