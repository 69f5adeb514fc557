"""The few shapes of the figures, as SVG elements."""

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


class Canvas:
    """Collects SVG elements in the order in which they are painted."""

    def __init__(self) -> None:
        self._elements: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        radius: float = 0,
        hint: str = "",
    ) -> None:
        """A filled rectangle; `hint` is shown when the pointer rests on it."""
        shape = (
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}"'
        )
        self._elements.append(
            f"{shape}><title>{escape(hint)}</title></rect>" if hint else shape + "/>"
        )

    def path(self, d: str, stroke: str, dashes: str = "") -> None:
        """A thin line along SVG path commands."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._elements.append(f'<path d="{d}" fill="none" stroke="{stroke}"{dashed}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        fill: str,
        anchor: str = "start",
        weight: str = "",
        turn: float = 0,
        room: float = 0,
    ) -> None:
        """A line of text; with `room`, cut to about that width."""
        # The width of a character is about 0.56 of the font size; an SVG is made without measuring
        # fonts.
        fits = int(room / (0.56 * size) + 0.5) if room else len(text)
        shown = text if len(text) <= fits else text[: fits - 1] + "…"
        extra = f' font-weight="{weight}"' if weight else ""
        extra += f' text-anchor="{anchor}"' if anchor != "start" else ""
        extra += f' transform="rotate({turn:g} {x:g} {y:g})"' if turn else ""
        # Text over a cell must not take the pointer away from the cell's hint.
        self._elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"{extra} '
            f'pointer-events="none">{escape(shown)}</text>'
        )

    @contextmanager
    def moved(self, x: float, y: float) -> Iterator[None]:
        """Move everything painted in this context by (x, y)."""
        self._elements.append(f'<g transform="translate({x:g} {y:g})">')
        yield
        self._elements.append("</g>")

    def svg(self, width: float, height: float, description: str) -> str:
        """The whole picture, on a white background, so that it is readable on a dark page too."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
                f'width="{width:g}" height="{height:g}" role="img" font-family="{_FONT}">',
                f"<desc>{escape(description)}</desc>",
                f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#ffffff"/>',
                *self._elements,
                "</svg>",
                "",
            ]
        )
