"""Draw docs/rooms.svg: the rooms of corp_cli, a row for every layer that import-linter holds, and their imports.

    python scripts/rooms.py

Bold arrows lead to rooms that are reached in no other way, thin ones are shortcuts, and one that points up is red.
"""

from __future__ import annotations

from pathlib import Path

import grimp
from importlinter import configuration
from importlinter.application.use_cases import read_user_options

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "rooms.svg"
PACKAGE = "corp_cli"
LEFT_OUT = ("errors", "version", "__main__")  # imported from everywhere, or importing nothing of interest
WIDTH, ROW, HEIGHT, MARGIN = 760, 92, 34, 24
Place = tuple[float, float, float]  # the middle of a box, its top, its width


def layers() -> list[list[str]]:
    """The rooms, a list for every layer, from the top."""
    configuration.configure()
    options = read_user_options(config_filename=str(ROOT / "pyproject.toml"))
    rows = next(one["layers"] for one in options.contracts_options if one["type"] == "layers")
    found = [[room for room in row.split(" | ") if room not in LEFT_OUT] for row in rows]
    return [row for row in found if row]


def imports(rooms: list[str]) -> set[tuple[str, str]]:
    """(importer, imported) of all pairs of rooms."""
    graph, found = grimp.build_graph(PACKAGE), set()
    for module in graph.modules:
        importer = module.split(".")[1] if "." in module else ""
        for other in graph.find_modules_directly_imported_by(module):
            imported = other.split(".")[1] if "." in other else ""
            if importer != imported and importer in rooms and imported in rooms:
                found.add((importer, imported))
    return found


def shortcuts(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those arrows whose end is also reached in two or more steps."""
    onward = {start: {b for a, b in arrows if a == start} for start, _ in arrows}

    def reaches(start: str, end: str, seen: frozenset[str]) -> bool:
        return any(n == end or reaches(n, end, seen | {n}) for n in onward.get(start, set()) - seen)

    return {(a, b) for a, b in arrows if any(n != b and reaches(n, b, frozenset({a, n})) for n in onward[a])}


def picture() -> str:
    """The SVG."""
    rows = layers()
    places: dict[str, Place] = {}
    for i, row in enumerate(rows):
        for j, room in enumerate(row):
            x = WIDTH * (j + 1) / (len(row) + 1)
            places[room] = x, MARGIN + i * ROW, 9.5 * len(room) + 28
    arrows = imports(list(places))
    thin = shortcuts(arrows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * MARGIN + (len(rows) - 1) * ROW + HEIGHT}" '
        'font-family="monospace" font-size="15">',
        '<rect width="100%" height="100%" fill="white"/>',
        "<defs>",
        *(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
            for name, colour in (("bold", "#24415c"), ("thin", "#b9c4cf"), ("up", "red"))
        ),
        "</defs>",
    ]
    for a, b in sorted(arrows, key=lambda pair: (pair not in thin, pair)):
        (x1, y1, _), (x2, y2, _) = places[a], places[b]
        kind = "up" if y2 <= y1 else "thin" if (a, b) in thin else "bold"
        colour, stroke = {"up": ("red", 2), "thin": ("#b9c4cf", 1), "bold": ("#24415c", 2)}[kind]
        bend = 0.0 if kind == "bold" else (1 if (x1 + x2) / 2 >= WIDTH / 2 else -1) * 0.4 * abs(y2 - y1 - ROW)
        start, middle, end = (x1, y1 + HEIGHT), ((x1 + x2) / 2 + bend, (y1 + HEIGHT + y2) / 2), (x2, y2 - 2)
        lines.append(
            f'<path d="M{start[0]:.0f} {start[1]:.0f} Q{middle[0]:.0f} {middle[1]:.0f} {end[0]:.0f} {end[1]:.0f}" '
            f'fill="none" stroke="{colour}" stroke-width="{stroke}" marker-end="url(#{kind})"/>'
        )
    for room, (x, y, width) in places.items():
        lines += [
            f'<rect x="{x - width / 2:.0f}" y="{y:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="6" fill="#e8eff6" '
            'stroke="#24415c"/>',
            f'<text x="{x:.0f}" y="{y + 22:.0f}" text-anchor="middle" fill="#14283a">{room}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
