"""A small chart per arm of the loss at each value that it tried, and of the comparison, as SVG."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precexp.report.build import ArmResult, Group, Report, losses_of
from precexp.report.charts import style_of
from precexp.report.match import spelled
from precexp.report.protocol import setting_cell
from precexp.report.tables import fixed
from precexp.report.tuning import Setting, Trial, Tuning, in_order

WIDTH, HEIGHT = 254, 168  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 24, 34  # around its plot
COLUMNS = 4
GAP = 14
LEGEND = 26
FARTHEST = 4  # times as far above the least loss as the middle one; what lies beyond is an arrow
STYLE = """
text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.multiple .title { font-weight: 600; fill: #16191d; }
.multiple .tick, .legend text { fill: #59626c; }
.multiple .frame { fill: none; stroke: #c4cad0; }
.multiple .line { fill: none; stroke-width: 1.5; }
.multiple .chosen { fill: none; stroke: #00664a; stroke-width: 2; }
.multiple .compared, .legend .compared { fill: none; stroke-width: 1.5; }
"""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What the panels of a group share, so that arms can be compared by eye."""

    settings: Sequence[Setting]  # from left to right
    labels: Sequence[str]
    low: float
    high: float

    def x(self, setting: Setting) -> float:
        share = (self.settings.index(setting) + 0.5) / len(self.settings)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, loss: float) -> float:
        share = (min(loss, self.high) - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def tuning_file(group: Group, report: Report) -> str:
    """The panels and a legend as the text of one SVG file."""
    drawn = list(_panels(group, report))
    columns = min(COLUMNS, len(drawn))
    width = max(columns * WIDTH + (columns - 1) * GAP, 420)
    height = LEGEND + -(-len(drawn) // COLUMNS) * (HEIGHT + GAP)
    placed = "".join(
        f'<g transform="translate({i % COLUMNS * (WIDTH + GAP)},'
        f'{LEGEND + i // COLUMNS * (HEIGHT + GAP)})">{panel}</g>'
        for i, (_, panel) in enumerate(drawn)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<g class="legend">{"".join(_legend())}</g>{placed}</svg>\n'
    )


def tuning_html(group: Group, report: Report) -> str:
    """The panels and a legend, as a grid that fits any width."""
    figures = "".join(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{panel}</svg>'
        for words, panel in _panels(group, report)
    )
    legend = f'<svg class="key" viewBox="0 0 420 {LEGEND}">{"".join(_legend())}</svg>'
    return f'<div class="multiples tuning">{legend}<div class="grid">{figures}</div></div>\n'


def _panels(group: Group, report: Report) -> Iterator[tuple[str, str]]:
    """Of each arm, the panel in words and its content."""
    compared = {arm.label: losses_of(arm, report.metric).losses for arm in group.arms}
    frame = _frame(group, compared)
    for arm in group.arms:
        if arm.tuning is not None:
            words = f"{arm.label}: {report.words} at each value tried"
            content = "".join(_panel(arm, arm.tuning, compared[arm.label], frame, report))
            yield html.escape(words), f'<g class="multiple tried">{content}</g>'


def _frame(group: Group, compared: Mapping[str, Mapping[int, float]]) -> Frame:
    tunings = [arm.tuning for arm in group.arms if arm.tuning is not None]
    found = {trial.setting: trial for tuning in tunings for trial in tuning.trials}
    trials = in_order(found.values())
    losses = np.array(
        [loss for tuning in tunings for each in tuning.trials for loss in each.losses.values()]
        + [loss for found in compared.values() for loss in found.values()]
    )
    least, most = float(losses.min()), float(losses.max())
    top = min(most, least + FARTHEST * (float(np.median(losses)) - least) or math.inf)
    spare = 0.08 * (top - least) or 0.01 * abs(least) or 1.0
    return Frame(
        settings=[trial.setting for trial in trials],
        labels=[_short(trial) for trial in trials],
        low=least - spare,
        high=top + spare,
    )


def _panel(
    arm: ArmResult, tuning: Tuning, compared: Mapping[int, float], frame: Frame, report: Report
) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    style = style_of(arm.label, report.labels)
    shown = arm.label if len(arm.label) <= 36 else f"{arm.label[:35]}…"
    yield f'<text class="title" x="0" y="14">{html.escape(shown)}</text>'
    yield f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
    for value, y in ((frame.high, TOP), (frame.low, bottom)):
        yield f'<text class="tick" x="{LEFT - 5}" y="{y + 4}" text-anchor="end">{value:.4g}</text>'
    for setting, label in zip(frame.settings, frame.labels, strict=True):
        yield (
            f'<text class="tick" x="{frame.x(setting)}" y="{bottom + 14}" text-anchor="middle">'
            f"{html.escape(label)}</text>"
        )
    axis = ", ".join(report.tuned)
    yield f'<text class="tick" x="{right}" y="{HEIGHT - 4}" text-anchor="end">{axis}</text>'
    yield f'<g class="ink" style="color:{style.colour};--arm-dark:{style.dark}">'
    means = [
        (frame.x(each.setting), frame.y(each.mean))
        for each in tuning.trials
        if each.mean is not None
    ]
    line = "L".join(f"{x} {y}" for x, y in means)
    yield f'<path class="line" stroke="currentColor" d="M{line}"/>' if means else ""
    for trial in tuning.trials:
        yield from _trial(trial, frame)
    if tuning.chosen is not None:
        yield from _chosen(tuning.chosen, compared, frame, report)
    yield "</g>"


def _trial(trial: Trial, frame: Frame) -> Iterator[str]:
    """A dot per seed, an arrow for one beyond the panel, a cross for one that came to nothing."""
    x = frame.x(trial.setting)
    for seed, loss in trial.losses.items():
        words = f"<title>selection seed {seed}: {fixed(loss)}</title>"
        if loss > frame.high:
            arrow = f"M{x - 4} {TOP + 6}L{x} {TOP}L{x + 4} {TOP + 6}Z"
            yield f'<path fill="currentColor" d="{arrow}">{words}</path>'
        else:
            dot = f'cx="{x}" cy="{frame.y(loss)}" r="2.6"'
            yield f'<circle fill="currentColor" {dot}>{words}</circle>'
    for i, seed in enumerate(trial.lost):
        left = x - 4 + 10 * i
        cross = f"M{left} {TOP + 10}l8 8m0 -8l-8 8"
        words = f"<title>selection seed {seed}: diverged or failed</title>"
        yield f'<path class="line" stroke="currentColor" d="{cross}">{words}</path>'


def _chosen(
    trial: Trial, compared: Mapping[int, float], frame: Frame, report: Report
) -> Iterator[str]:
    """A ring around the chosen mean, and beside it the comparison seeds."""
    x = frame.x(trial.setting)
    if trial.mean is not None:
        words = f"<title>chosen: {html.escape(setting_cell(trial, report))}</title>"
        yield f'<circle class="chosen" cx="{x}" cy="{frame.y(trial.mean)}" r="7">{words}</circle>'
    for seed, loss in compared.items():
        words = f"<title>comparison seed {seed}: {fixed(loss)}</title>"
        yield (
            f'<path class="compared" stroke="currentColor" d="{_diamond(x + 14, frame.y(loss))}">'
            f"{words}</path>"
        )


def _legend() -> Iterator[str]:
    yield '<circle fill="#59626c" cx="8" cy="12" r="2.6"/><text x="16" y="16">selection seed</text>'
    yield (
        '<circle fill="none" stroke="#00664a" stroke-width="2" cx="122" cy="12" r="6"/>'
        '<text x="134" y="16">chosen by their mean</text>'
    )
    yield (
        f'<path class="compared" stroke="#59626c" d="{_diamond(272, 12)}"/>'
        '<text x="284" y="16">comparison seed</text>'
    )


def _diamond(x: float, y: float) -> str:
    return f"M{round(x, 1)} {round(y - 4.5, 1)}l4.5 4.5l-4.5 4.5l-4.5 -4.5Z"


def _short(trial: Trial) -> str:
    """The value under its place; of several keys their values, in the order of the axis' name."""
    return ", ".join(map(spelled, trial.setting))
