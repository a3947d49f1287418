"""Draws the small pictures of docs/explanation/seven-ways.md: `python docs/_generate/seven_ways.py`."""

from __future__ import annotations

from math import hypot
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images" / "seven-ways"
SIZE = (220, 150)
INK, FAINT, DATA, MODEL = "#333333", "#bbbbbb", "#e69f00", "#0072b2"
SERVER, HOLDERS = (110, 34), ((40, 108), (110, 108), (180, 108))
PEERS = ((110, 36), (40, 108), (180, 108))  # a triangle, so that no arrow crosses a holder
Point = tuple[float, float]


def _gap(place: Point) -> float:
    return 33 if place == SERVER else 25  # the server's box is wider than a holder's circle


def arrow(start: Point, end: Point, width: float = 2, left_out: bool = False, shift: float = 0) -> str:
    """Return an arrow between two places, which ends before them; `shift` moves it to its right."""
    length = hypot(end[0] - start[0], end[1] - start[1])
    x, y = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    (x1, y1), (x2, y2) = (
        (place[0] + way * x - shift * y, place[1] + way * y + shift * x)
        for place, way in ((start, _gap(start)), (end, -_gap(end)))
    )
    colour, dash = (FAINT, ' stroke-dasharray="4 4"') if left_out else (INK, "")
    head = 4 + width
    points = f"{x2:.1f},{y2:.1f} " + " ".join(
        f"{x2 - head * x + side * head / 2 * y:.1f},{y2 - head * y - side * head / 2 * x:.1f}" for side in (1, -1)
    )
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2 - head * x:.1f}" y2="{y2 - head * y:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{dash}/><polygon points="{points}" fill="{colour}"/>'
    )


def holder(at: Point, model: bool = True, data: bool = True) -> str:
    """Return a data holder: a circle with data (a square) and a model (a disc) in it."""
    x, y = at
    parts = [f'<circle cx="{x}" cy="{y}" r="22" fill="white" stroke="{INK}" stroke-width="1.5"/>']
    beside = 9 if model and data else 0
    if data:
        parts.append(f'<rect x="{x - 6 - beside}" y="{y - 6}" width="12" height="12" fill="{DATA}"/>')
    if model:
        parts.append(f'<circle cx="{x + beside}" cy="{y}" r="6.5" fill="{MODEL}"/>')
    return "".join(parts)


def server(data: bool = False) -> str:
    """Return the server, a box with a model and perhaps the data of all holders."""
    x, y = SERVER
    parts = [f'<rect x="{x - 32}" y="{y - 20}" width="64" height="40" fill="white" stroke="{INK}" stroke-width="1.5"/>']
    if data:
        parts += [f'<rect x="{x - 27 + 11 * n}" y="{y - 4}" width="9" height="9" fill="{DATA}"/>' for n in range(3)]
    parts.append(f'<circle cx="{x + (18 if data else 0)}" cy="{y}" r="6.5" fill="{MODEL}"/>')
    return "".join(parts)


def central(widths: tuple[float, ...], left_out: int | None = None) -> str:
    """Return holders that send models to a server, which sends one back."""
    up = [arrow(at, SERVER, widths[n], n == left_out, shift=-6) for n, at in enumerate(HOLDERS)]
    down = [arrow(SERVER, at, 2, shift=-6) for at in HOLDERS]
    return "".join([*up, *down, server(), *map(holder, HOLDERS)])


def peer(widths: tuple[float, ...], left_out: int | None = None) -> str:
    """Return holders that send models to each other; the arrows from the last one may be left out or wide."""
    pairs = [(one, other) for one in range(3) for other in range(3) if one != other]
    sent = [arrow(PEERS[a], PEERS[b], widths[a], a == left_out, shift=-6) for a, b in pairs]
    return "".join([*sent, *map(holder, PEERS)])


def pictures() -> dict[str, str]:
    """Return the seven pictures by name, as SVG."""
    alike, weighted = (2, 2, 2), (2, 5, 1)
    drawn = {
        "pooled": "".join(
            [*(arrow(at, SERVER) for at in HOLDERS), server(data=True), *(holder(at, model=False) for at in HOLDERS)]
        ),
        "local": "".join(map(holder, HOLDERS)),
        "central-standard": central(alike),
        "central-weighted": central(weighted),
        "central-selective": central(alike, left_out=2),
        "peer-weighted": peer(weighted),
        "peer-selective": peer(alike, left_out=2),
    }
    width, height = SIZE
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    return {name: f"{frame}{ground}{inside}</svg>\n" for name, inside in drawn.items()}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")
