"""Small multiples of an arm's probes: a panel per probe, a line per kind of parameters, as SVG."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from precexp.report.curves import Band, Floats, thin
from precexp.report.palette import KIND_COLOURS
from precexp.report.probes import KINDS, PROBES, ArmProbes, Probe

WIDTH, HEIGHT = 254, 150  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 24, 20  # around its plot
COLUMNS = 4
GAP = 14
LEGEND = 26  # the height of a legend
NUM_BUCKETS = 40  # of a line, each with its least and greatest value
STYLE = """
text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.multiple .title { font-weight: 600; fill: #16191d; }
.multiple .tick, .legend text { fill: #59626c; }
.multiple .frame { fill: none; stroke: #c4cad0; }
.multiple .band { fill: #00664a; opacity: 0.09; }
.multiple .edge { stroke: #00664a; stroke-dasharray: 3 3; }
.multiple .threshold { fill: #00664a; font-size: 10px; stroke: #ffffff; stroke-width: 3; }
.multiple .threshold { paint-order: stroke; stroke-linejoin: round; }
.multiple .line, .legend .line { fill: none; stroke-width: 1.3; stroke-linejoin: round; }
.multiple .norm, .legend .norm { stroke-width: 2; stroke-dasharray: 5 2; }
.multiple .all, .legend .all { stroke-width: 2; }
"""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The vertical axis of a panel."""

    low: float
    high: float
    logarithmic: bool

    def place(self, values: Floats) -> Floats:
        """Ordinates within the panel; what lies beyond the axis is at its edge, nan stays nan."""
        low, high = self._scaled(np.array([self.low, self.high]))
        shares = (self._scaled(values) - low) / (high - low)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - shares.clip(-0.02, 1.02))

    def _scaled(self, values: Floats) -> Floats:
        if not self.logarithmic:
            return values
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(values > 0, np.log10(values), np.nan)


def multiples_file(found: ArmProbes) -> str:
    """The panels and a legend as the text of one SVG file."""
    drawn = list(panels(found))
    rows = -(-len(drawn) // COLUMNS)
    width = COLUMNS * WIDTH + (COLUMNS - 1) * GAP
    height = LEGEND + rows * (HEIGHT + GAP)
    placed = "".join(
        f'<g transform="translate({(i % COLUMNS) * (WIDTH + GAP)},'
        f'{LEGEND + i // COLUMNS * (HEIGHT + GAP)})">{panel}</g>'
        for i, panel in enumerate(drawn)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<g class="legend">{_legend_marks(found)}</g>{placed}</svg>\n'
    )


def multiples_html(found: ArmProbes) -> str:
    """The panels and a legend, as a grid that fits any width."""
    figures = "".join(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(probe.title)}">'
        f"{panel}</svg>"
        for probe, panel in zip(_drawn(found), panels(found), strict=True)
    )
    legend = "".join(
        f'<span><svg viewBox="0 0 24 10" aria-hidden="true">{_mark(kind, 1, 5)}</svg>{kind}</span>'
        for kind in _kinds(found)
    )
    return (
        f'<div class="multiples"><p class="legend">{legend}</p>'
        f'<div class="grid">{figures}</div></div>\n'
    )


def panels(found: ArmProbes) -> Iterator[str]:
    """The content of each panel, in the order of the probes."""
    last = max(int(band.step[-1]) for band in found.bands.values())
    for probe in _drawn(found):
        lines = {
            kind: thin(band, num_buckets=NUM_BUCKETS)
            for kind in KINDS
            if (band := found.bands.get((probe.name, kind))) is not None
        }
        yield f'<g class="multiple">{"".join(_panel(probe, lines, last))}</g>'


def _drawn(found: ArmProbes) -> list[Probe]:
    names = {name for name, kind in found.bands if kind in KINDS}
    return [probe for probe in PROBES if probe.name in names]


def _panel(probe: Probe, lines: dict[str, Band], last: int) -> Iterator[str]:
    axis = _axis(probe, list(lines.values()))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    labels = []
    yield f'<text class="title" x="0" y="14">{html.escape(probe.title)}</text>'
    if probe.band is not None:
        low, high = axis.place(np.array(probe.band)).tolist()
        yield (
            f'<rect class="band" x="{LEFT}" y="{high:.1f}" width="{right - LEFT}" '
            f'height="{low - high:.1f}"/>'
        )
    for value, words in probe.lines:
        if axis.low <= value <= axis.high:
            (y,) = axis.place(np.array([value])).tolist()
            yield f'<path class="edge" d="M{LEFT} {y:.1f}H{right}"/>'
            labels.append(
                f'<text class="threshold" x="{right - 3}" y="{y - 3:.1f}" text-anchor="end">'
                f"{words}</text>"
            )
    yield f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
    for value in (axis.low, axis.high):
        (y,) = axis.place(np.array([value])).tolist()
        yield (
            f'<text class="tick" x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.2g}'
            "</text>"
        )
    yield f'<text class="tick" x="{LEFT}" y="{HEIGHT - 5}">step 0</text>'
    yield f'<text class="tick" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{last:,}</text>'
    for kind, band in lines.items():
        yield _line(kind, band, axis, last)
    yield from labels  # over the lines


def _line(kind: str, band: Band, axis: Axis, last: int) -> str:
    """A line with its gaps; a dot where there is but one point."""
    x = LEFT + (WIDTH - LEFT - RIGHT) * band.step / last
    y = axis.place(band.mean)
    colour, words = KIND_COLOURS[kind], f"{kind}: {band.mean[-1]:.3g} at step {band.step[-1]:,}"
    seen = np.isfinite(y)
    if seen.sum() == 1:
        (i,) = np.flatnonzero(seen)
        return (
            f'<circle class="dot {kind}" cx="{x[i]:.1f}" cy="{y[i]:.1f}" r="3" fill="{colour}">'
            f"<title>{words}</title></circle>"
        )
    parts = []
    joined = False
    for place, height, there in zip(x.tolist(), y.tolist(), seen.tolist(), strict=True):
        if there:
            parts.append(f"{'L' if joined else 'M'}{place:.1f} {height:.1f}")
        joined = there
    return (
        f'<path class="line {kind}" stroke="{colour}" d="{"".join(parts)}">'
        f"<title>{words}</title></path>"
    )


def _axis(probe: Probe, bands: Sequence[Band]) -> Axis:
    values = np.concatenate([band.mean for band in bands])
    if probe.logarithmic:
        values = values[values > 0]
    low = min(probe.limits[0], float(values.min(initial=math.inf)))
    high = max(probe.limits[1], float(values.max(initial=-math.inf)))
    return Axis(
        low=max(low, probe.bounds[0]),
        high=min(high, probe.bounds[1]),
        logarithmic=probe.logarithmic,
    )


def _legend_marks(found: ArmProbes) -> str:
    return "".join(
        f'{_mark(kind, 92 * i, 12)}<text x="{92 * i + 27}" y="16">{kind}</text>'
        for i, kind in enumerate(_kinds(found))
    )


def _mark(kind: str, x: int, y: int) -> str:
    return f'<path class="line {kind}" stroke="{KIND_COLOURS[kind]}" d="M{x} {y}h22"/>'


def _kinds(found: ArmProbes) -> list[str]:
    return [kind for kind in KINDS if any(kind == each for _, each in found.bands)]
