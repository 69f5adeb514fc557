"""A treemap of a profile: a nested rectangle for each scope, with an area proportional to its time."""

from __future__ import annotations

from html import escape

from tailrace.base.messages import shown
from tailrace.profiling.profile.measurement import Measurement

_WIDTH, _HEIGHT, _HEAD = 900.0, 520.0, 16.0
_COLOURS = {
    "forward": "#4477aa",
    "backward": "#aa5544",
    "optimizer": "#997722",
    "accumulation": "#668833",
    "replicas": "#774488",
    "stages": "#558899",
    "feeds": "#337766",
    "taps": "#995577",
    "loop": "#777777",
}

Box = tuple[float, float, float, float]  # x, y, width, height


class _Node:
    """A phase or scope, with the time of everything in it."""

    def __init__(self, name: str) -> None:
        self.name, self.seconds = name, 0.0
        self.inside: dict[str, _Node] = {}

    def add(self, path: list[str], seconds: float) -> None:
        self.seconds += seconds
        if path:
            child = self.inside.setdefault(path[0], _Node(path[0]))
            child.add(path[1:], seconds)


def treemap_svg(profile: Measurement) -> str:
    """The picture as SVG text; names come from a program and are escaped."""
    root = _Node("")
    for row in profile.rows:
        root.add([row.phase, *filter(None, row.scope.split("/"))], row.seconds)
    parts: list[str] = []
    _draw(root, (0, 0, _WIDTH, _HEIGHT), "", max(root.seconds, 1e-30), parts, 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" '
        f'role="img" aria-label="time by phase and scope" '
        f'font-family="system-ui, sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


def _draw(node: _Node, box: Box, colour: str, whole: float, parts: list[str], depth: int) -> None:
    x, y, width, height = box
    if width < 1 or height < 1:
        return  # less than a pixel
    inner = box
    if node.name:
        share = f"{node.seconds / whole:.1%}"
        name = escape(shown(node.name))
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour}" fill-opacity="{0.55 + 0.12 * min(depth, 3):.2f}" stroke="#fff">'
            f"<title>{name}: {share}</title></rect>"
        )
        # SVG does not cut text at the edge of a box; at this font size a character is about 6.2 wide.
        room = int((width - 6) / 6.2)
        if height >= 13 and room >= 3:
            text = f"{shown(node.name)} {share}"
            text = text if len(text) <= room else f"{text[: room - 1]}…"
            parts.append(
                f'<text x="{x + 4:.1f}" y="{y + 12:.1f}" fill="#fff">{escape(text)}</text>'
            )
        inner = (x + 2, y + _HEAD, width - 4, height - _HEAD - 2)
    children = sorted(node.inside.values(), key=lambda child: -child.seconds)
    for child, place in zip(children, _places([c.seconds for c in children], inner), strict=True):
        # A phase has a colour; the scopes in it get more opaque with depth.
        shade = _COLOURS.get(child.name, "#777777") if not node.name else colour
        _draw(child, place, shade, whole, parts, depth + 1)


def _places(sizes: list[float], box: Box) -> list[Box]:
    """Boxes with areas proportional to `sizes` (descending), as close to squares as rows allow."""
    x, y, width, height = box
    total = sum(sizes)
    if not sizes or total <= 0 or width <= 0 or height <= 0:
        return [(x, y, 0.0, 0.0)] * len(sizes)
    scale = width * height / total
    placed: list[Box] = []
    start = 0
    # The squarified layout (Bruls, Huizing, van Wijk 2000): a row takes boxes as long as its worst
    # one becomes more square, and then the next row fills what is left.
    while start < len(sizes):
        side = min(width, height)
        stop = start + 1
        while stop < len(sizes) and _worst(sizes[start : stop + 1], scale, side) <= _worst(
            sizes[start:stop], scale, side
        ):
            stop += 1
        row = sizes[start:stop]
        thick = sum(row) * scale / side if side > 0 else 0.0
        along = 0.0
        for size in row:
            length = size * scale / thick if thick > 0 else 0.0
            if width >= height:
                placed.append((x, y + along, thick, length))
            else:
                placed.append((x + along, y, length, thick))
            along += length
        if width >= height:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        start = stop
    return placed


def _worst(row: list[float], scale: float, side: float) -> float:
    """The worst aspect ratio in a row."""
    total = sum(row) * scale
    if total <= 0 or side <= 0 or min(row) <= 0:
        return float("inf")
    # A box of area a, in a row of area s along a side w, is s / w by a w / s: the ratio is w^2 a / s^2
    # or its inverse, and the extremes are at the largest and the smallest box.
    return max(side**2 * max(row) * scale / total**2, total**2 / (side**2 * min(row) * scale))
