"""Where the boxes and lines of a drawing go: columns from left to right, no two things overlap.

Every link goes from its box's right side to the next column. Where it passes a column, a place of
its own is kept free there; where it leads back, it goes round below all boxes. A link's label
stands at its beginning, in a part of the gap behind its column where lines run straight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

PORT = 40.0
"""Between the links at one side of a box, and the height kept free for one that passes."""
_GAP = 28.0
_MARGIN = 8.0
_CURVE = 56.0
_LANE = 16.0
_SWEEPS = 4
Point = tuple[float, float]
# A box's name, or a link's number and the column that it passes.
_Item = str | tuple[int, int]


@dataclass(frozen=True)
class Box:
    """What is to be placed; it may become higher to have room for its links."""

    name: str
    width: float
    height: float


@dataclass(frozen=True)
class Link:
    """A line between two boxes."""

    source: str
    target: str
    label_width: float


@dataclass(frozen=True)
class Place:
    """Where a box is."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """Where everything is."""

    width: float
    height: float
    places: Mapping[str, Place]
    lines: Sequence[Sequence[Point]]
    """Each link's way, from source to target. Neighbours that differ in both coordinates are
    joined by a curve that is level at its ends."""


def lay_out(boxes: Sequence[Box], links: Sequence[Link]) -> Layout:
    """Return where boxes and links go."""
    return _Drawing(boxes, links).layout()


class _Drawing:
    """One drawing in the making."""

    def __init__(self, boxes: Sequence[Box], links: Sequence[Link]) -> None:
        self.links = links
        self.boxes = {box.name: _with_ports(box, links) for box in boxes}
        self.back = _back_links(list(self.boxes), links)
        self.column = _columns(list(self.boxes), links, self.back)
        widest: dict[int, float] = {}
        for name, column in self.column.items():
            widest[column] = max(widest.get(column, 0.0), self.boxes[name].width)
        self.widths = [widest[column] for column in sorted(widest)]
        self.columns: list[list[_Item]] = [[] for _ in self.widths]
        for name, column in self.column.items():
            self.columns[column].append(name)
        for number in self.forward():
            for column in self._passed(number):
                self.columns[column].append((number, column))

    def forward(self) -> list[int]:
        return [number for number in range(len(self.links)) if number not in self.back]

    def layout(self) -> Layout:
        before = self._neighbours(-1)
        after = self._neighbours(1)
        for _ in range(_SWEEPS):
            self._order(self.columns[1:], before)
            self._order(self.columns[-2::-1], after)
        center = self._centers(before, after)
        starts, strips, width = self._abscissas()
        places = {
            name: Place(starts[at], center[name] - box.height / 2, self.widths[at], box.height)
            for name, box in self.boxes.items()
            for at in [self.column[name]]
        }
        bottom = max((place.y + place.height for place in places.values()), default=0.0)
        bottom = max([bottom, *(center[item] + PORT / 2 for item in center)])
        lines = self._lines(places, center, (starts, strips), bottom)
        height = bottom + _LANE * len(self.back) + _MARGIN
        return Layout(width, height, places, lines)

    # Rows

    def _passed(self, number: int) -> range:
        link = self.links[number]
        return range(self.column[link.source] + 1, self.column[link.target])

    def _way(self, number: int) -> list[_Item]:
        link = self.links[number]
        between = [(number, column) for column in self._passed(number)]
        return [link.source, *between, link.target]

    def _neighbours(self, side: int) -> dict[_Item, list[_Item]]:
        """Return what every item is linked with in the column before (-1) or after (1) it."""
        found: dict[_Item, list[_Item]] = {}
        for number in self.forward():
            way = self._way(number)
            for one, other in pairwise(way):
                near, far = (other, one) if side < 0 else (one, other)
                found.setdefault(near, []).append(far)
        return found

    def _order(
        self, columns: Sequence[list[_Item]], neighbours: Mapping[_Item, list[_Item]]
    ) -> None:
        """Sort each column by the mean row of its items' neighbours, so that few lines cross."""
        for column in columns:
            row = {item: index for items in self.columns for index, item in enumerate(items)}
            column.sort(key=lambda item: _mean([row[n] for n in neighbours.get(item, [item])]))

    def _height(self, item: _Item) -> float:
        return self.boxes[item].height if isinstance(item, str) else PORT

    def _centers(
        self, before: Mapping[_Item, list[_Item]], after: Mapping[_Item, list[_Item]]
    ) -> dict[_Item, float]:
        """Return the ordinate of every item's middle: near its neighbours', apart in a column."""
        center: dict[_Item, float] = {item: 0.0 for column in self.columns for item in column}
        for sweep in range(2 * _SWEEPS):
            neighbours = before if sweep % 2 == 0 else after
            for column in self.columns if sweep % 2 == 0 else reversed(self.columns):
                wanted = [
                    _mean([center[other] for other in neighbours.get(item, [item])])
                    for item in column
                ]
                heights = [self._height(item) for item in column]
                center |= zip(column, _apart(wanted, heights), strict=True)
        top = min((center[item] - self._height(item) / 2 for item in center), default=0.0)
        return {item: y - top + _MARGIN for item, y in center.items()}

    # Columns

    def _abscissas(self) -> tuple[list[float], list[float], float]:
        """Return where columns begin, where their strips do, and the whole width.

        A strip, for links that lead back, lies before each column and behind the last.
        """
        starts: list[float] = []
        strips = [_MARGIN]
        x = _MARGIN + self._strip_width(0)
        for index, width in enumerate(self.widths):
            starts.append(x)
            x += width
            labels = [link.label_width for link in self.links if self.column[link.source] == index]
            is_last = index == len(self.widths) - 1
            x += max(labels, default=0.0) + (_GAP if labels else 0.0)
            x += 0.0 if is_last else _CURVE
            strips.append(x)
            x += self._strip_width(index + 1)
        return starts, strips, x + _MARGIN

    def _strip_width(self, index: int) -> float:
        return _LANE * len(self._in_strip(index))

    def _in_strip(self, index: int) -> list[tuple[int, bool]]:
        """Return the links back that go down (True) or up in the strip before a column."""
        down = [(n, True) for n in self.back if self.column[self.links[n].source] == index - 1]
        up = [(n, False) for n in self.back if self.column[self.links[n].target] == index]
        return down + up

    # Lines

    def _lines(
        self,
        places: Mapping[str, Place],
        center: Mapping[_Item, float],
        abscissas: tuple[list[float], list[float]],
        bottom: float,
    ) -> list[list[Point]]:
        starts, strips = abscissas
        out = self._ports(center, is_source=True)
        into = self._ports(center, is_source=False)
        lines: list[list[Point]] = []
        for number, link in enumerate(self.links):
            source, target = places[link.source], places[link.target]
            begin = (source.x + source.width, out[number])
            end = (target.x, into[number])
            if number in self.back:
                x_down = strips[self.column[link.source] + 1] + self._lane(number, is_down=True)
                x_up = strips[self.column[link.target]] + self._lane(number, is_down=False)
                y = bottom + _LANE * (1 + self.back.index(number)) - _LANE / 2
                way = [(x_down, begin[1]), (x_down, y), (x_up, y), (x_up, end[1])]
                lines.append([begin, *way, end])
                continue
            points = [begin]
            ordinates = [center[(number, column)] for column in self._passed(number)]
            first = self.column[link.source] + 1
            for column, y in enumerate([*ordinates, end[1]], first):
                # The curve of a gap lies right before its strip.
                points += [(strips[column] - _CURVE, points[-1][1]), (strips[column], y)]
                points.append((starts[column], y))
            lines.append([*points[:-1], end])
        return lines

    def _lane(self, number: int, *, is_down: bool) -> float:
        link = self.links[number]
        index = self.column[link.source] + 1 if is_down else self.column[link.target]
        return _LANE * (0.5 + self._in_strip(index).index((number, is_down)))

    def _ports(self, center: Mapping[_Item, float], *, is_source: bool) -> dict[int, float]:
        """Return the ordinate at which each link leaves its source, or enters its target."""
        ports: dict[int, float] = {}
        for name in self.boxes:
            ends = [(link.source if is_source else link.target) for link in self.links]
            here = [number for number, end in enumerate(ends) if end == name]
            # Links back leave and enter lowest: they go round below.
            here.sort(key=lambda n: (n in self.back, self._far_ordinate(n, center, is_source)))
            for index, number in enumerate(here):
                ports[number] = center[name] + PORT * (index - (len(here) - 1) / 2)
        return ports

    def _far_ordinate(self, number: int, center: Mapping[_Item, float], is_source: bool) -> float:
        way = self._way(number)
        return center[way[1] if is_source else way[-2]]


def _with_ports(box: Box, links: Sequence[Link]) -> Box:
    outgoing = sum(link.source == box.name for link in links)
    incoming = sum(link.target == box.name for link in links)
    return Box(box.name, box.width, max(box.height, PORT * max(outgoing, incoming)))


def _back_links(names: Sequence[str], links: Sequence[Link]) -> list[int]:
    """Return the links without which nothing leads back to where it came from."""
    back: list[int] = []
    is_open: dict[str, bool] = {}

    def visit(name: str) -> None:
        is_open[name] = True
        for number, link in enumerate(links):
            if link.source != name:
                continue
            if link.target not in is_open:
                visit(link.target)
            elif is_open[link.target]:
                back.append(number)
        is_open[name] = False

    for name in names:
        if name not in is_open:
            visit(name)
    return sorted(back)


def _columns(names: Sequence[str], links: Sequence[Link], back: Sequence[int]) -> dict[str, int]:
    """Return each box's column: behind all that lead to it, and close to what it leads to."""
    forward = [link for number, link in enumerate(links) if number not in back]
    column = dict.fromkeys(names, 0)
    for _ in names:
        for link in forward:
            column[link.target] = max(column[link.target], column[link.source] + 1)
    targets = {link.target for link in forward}
    for name in names:
        following = [column[link.target] for link in forward if link.source == name]
        if name not in targets and following:
            column[name] = min(following) - 1
    return column


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _apart(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return the middles nearest to ``wanted`` at which things in this order do not touch."""
    offsets = [0.0]
    for upper, lower in pairwise(heights):
        offsets.append(offsets[-1] + (upper + lower) / 2 + _GAP)
    # Without offsets: the nearest sequence that does not fall, blocks of equal values joined.
    blocks: list[tuple[float, int]] = []
    for value, offset in zip(wanted, offsets, strict=True):
        blocks.append((value - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (second, n), (first, m) = blocks.pop(), blocks.pop()
            blocks.append(((first * m + second * n) / (m + n), m + n))
    levels = [level for level, count in blocks for _ in range(count)]
    return [level + offset for level, offset in zip(levels, offsets, strict=True)]
