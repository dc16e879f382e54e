"""The figures of a report: loss curves with differences to the reference arm, and memory."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from precexp.report.build import ArmResult, Group, Report
from precexp.report.curves import (
    EARLY,
    Band,
    Floats,
    difference_band,
    eval_band,
    thin,
    train_band,
)
from precexp.report.match import FORCED
from precexp.report.memory import CATEGORIES
from precexp.report.palette import CATEGORY_COLOURS, COLOURS
from precexp.report.read import Curve, ReportedRun
from precexp.report.tables import MIB, percent

MARKERS = "osD^vPX"
# Nothing here depends on the user's fonts, clock or matplotlibrc: the bytes are always the same.
STYLE = {
    "svg.hashsalt": "precexp",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.8,
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
}
PNG_DPI = 200  # 2x


def write_loss_curves(report: Report, output: Path) -> None:
    """Writes loss_curves.svg and .png; the same report gives the same bytes."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[call-overload]
        figure = draw_loss_curves(report)
        figure.savefig(output / "loss_curves.svg", metadata={"Date": None})
        figure.savefig(output / "loss_curves.png", dpi=PNG_DPI)


def write_memory_figure(arms: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Writes path.svg and path.png: a stacked bar per arm of what its peak is made of.

    `arms` has, by the arm's label, bytes by category, as in memory.planned.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[call-overload]
        figure = _draw_memory(arms)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=PNG_DPI)


def _draw_memory(arms: Mapping[str, Mapping[str, float]]) -> Figure:
    figure = Figure(figsize=(9.0, 1.6 + 0.55 * len(arms)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = list(arms)
    ends = np.zeros(len(arms))
    seen = 0.002 * max(sum(sizes.values()) for sizes in arms.values()) / MIB  # as a line at least
    for key, words in CATEGORIES.items():
        sizes = np.array([max(arms[label].get(key, 0), 0) for label in labels]) / MIB
        if sizes.max(initial=0) > seen:
            axes.barh(
                labels, sizes, left=ends, color=CATEGORY_COLOURS[key], label=words, height=0.62
            )
            ends += sizes
    for place, end in enumerate(ends):
        axes.text(end, place, f" {end:,.0f}", va="center", color="#333333")
    axes.invert_yaxis()
    axes.set_xlim(0, ends.max(initial=0) * 1.1 or 1)
    axes.set_xlabel("MiB (2^20 bytes) allocated at the peak of a training step")
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.legend(loc="outside upper left", ncols=4, frameon=False, handlelength=1.2)
    return figure


def draw_loss_curves(report: Report) -> Figure:
    """A panel per match group, with its differences below where arms are compared.

    Arms keep their colour and marker across panels.
    """
    num_groups = max(len(report.groups), 1)
    num_columns = {1: 1, 2: 2, 4: 2}.get(num_groups, 3)
    num_rows = -(-num_groups // num_columns)
    compares = any(_is_compared(group) for group in report.groups)
    figure = Figure(
        figsize=(max(9.0, 4.6 * num_columns), (6.4 if compares else 4.4) * num_rows),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    heights = [2.1, 1] if compares else [1]
    grid = figure.add_gridspec(
        len(heights) * num_rows, num_columns, height_ratios=heights * num_rows
    )
    for i, group in enumerate(report.groups):
        row, column = divmod(i, num_columns)
        axes = figure.add_subplot(grid[len(heights) * row, column])
        _draw_losses(axes, group, report.labels)
        if compares:
            lower = figure.add_subplot(grid[len(heights) * row + 1, column], sharex=axes)
            _draw_differences(lower, group, report)
            axes.tick_params(labelbottom=False)
            axes = lower
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if report.groups:
        _draw_legend(figure, report)
    else:
        _set_title(figure.add_subplot(grid[0, 0]), "No loss was recorded")
    return figure


def _draw_losses(axes: Axes, group: Group, labels: Sequence[str]) -> None:
    faint = max(0.3 / len(group.arms), 0.08)  # training losses of one seed overlap
    seen: list[Floats] = []
    for i, arm in enumerate(group.arms):
        place = labels.index(arm.label)
        curves = [run.curve for run in arm.compared.values() if run.curve is not None]
        train, evals = thin(train_band(curves)), thin(eval_band(curves))
        axes.plot(train.step, train.mean, color=_colour(place), lw=0.7, alpha=faint)
        _draw_band(axes, evals, place=place, num_above=len(group.arms) - 1 - i)
        seen += [_late(train, train.mean), _late(evals, evals.low), _late(evals, evals.high)]
    loose = [(arm, run, run.curve) for arm in group.arms for run in _loose(arm, group) if run.curve]
    if not any(map(len, seen)):  # only then may runs that did not complete set the limits
        bands = [train_band([curve]) for _, _, curve in loose]
        # A loss above where it began is one that diverges: that part may leave the panel.
        seen += [_late(band, band.mean.clip(max=band.mean[0])) for band in bands if len(band.mean)]
    if any(map(len, seen)):
        axes.set_ylim(_limits(np.concatenate(seen), pad=0.05))
    for arm, run, curve in loose:
        _draw_loose(axes, curve, place=labels.index(arm.label), diverged=run.status == "diverged")
    above = "Forced: these runs do not match" if group.match_key == FORCED else group.title
    _set_title(axes, "Eval loss, nats per token", above=above)


def _draw_differences(axes: Axes, group: Group, report: Report) -> None:
    axes.axhline(0, color="#555555", lw=0.9)
    if not _is_compared(group):
        axes.set_yticks([])
        _set_title(axes, "Nothing to compare with")
        return
    reference, *others = group.arms
    margin = group.margin or 0.0
    seen = [np.array([-margin, margin])]
    bands = [(arm, thin(difference_band(arm, reference))) for arm in others]
    if not any(len(band.step) for _, band in bands):
        axes.set_yticks([])
        _set_title(axes, "No evaluation in common")
        return
    for arm, band in bands:
        _draw_band(axes, band, place=report.labels.index(arm.label))
        seen += [_late(band, band.low), _late(band, band.high)]
    if group.noise is not None:
        seen.append(np.array([-group.noise, group.noise]))
    axes.set_ylim(_limits(np.concatenate(seen), pad=0.18))
    if margin:
        _draw_margin(axes, margin, f"margin ±{percent(report.margin)}")
    if group.noise is not None:
        _draw_noise(axes, group.noise)
    _set_title(axes, f"Difference in eval loss to {group.reference}, seed by seed")


def _draw_margin(axes: Axes, margin: float, text: str) -> None:
    axes.axhspan(-margin, margin, color="#000000", alpha=0.05, lw=0, zorder=0.5)
    for edge in (-margin, margin):
        axes.axhline(edge, color="#777777", lw=0.8, ls=(0, (4, 3)))
    axes.annotate(
        text,
        (1, -margin),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -2),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color="#555555",
        bbox={"facecolor": "white", "lw": 0, "pad": 1},
    )


def _draw_noise(axes: Axes, noise: float) -> None:
    """The yardstick: how far the reference's own seeds lie apart, as a bar at the right edge."""
    axes.errorbar(
        [0.995],
        [0],
        yerr=[noise],
        transform=axes.get_yaxis_transform(),
        color="#555555",
        lw=1.2,
        capsize=3,
        zorder=4,
    )


def _draw_band(axes: Axes, band: Band, *, place: int, num_above: int = 0) -> None:
    """The mean with markers, over the range of the seeds.

    It is the wider the more curves will be drawn above it: where they cover it, it shows on both
    sides.
    """
    if not len(band.step):
        return
    axes.fill_between(band.step, band.low, band.high, color=_colour(place), alpha=0.12, lw=0)
    axes.plot(
        band.step,
        band.mean,
        color=_colour(place),
        lw=min(1.5 + 0.8 * num_above, 4.0),
        ls=_line(place),
        marker=MARKERS[place % len(MARKERS)],
        ms=min(5.5 + 1.3 * num_above, 10),
        markevery=max(1, len(band.step) // 15),
        mec="white",
        mew=0.5,
    )


def _draw_loose(axes: Axes, curve: Curve, *, place: int, diverged: bool) -> None:
    """A run that did not complete: it ends in a cross (diverged) or a ring (stopped)."""
    train, evals = thin(train_band([curve])), eval_band([curve])
    axes.plot(train.step, train.mean, color=_colour(place), lw=0.9, alpha=0.5)
    axes.plot(evals.step, evals.mean, color=_colour(place), lw=1.1, ls=(0, (2, 1.5)))
    if not len(train.step):
        return
    bottom, top = axes.get_ylim()
    # A loss that has left the panel for good is marked where it left.
    last = min(int(np.flatnonzero(train.mean <= top).max(initial=-1)) + 1, len(train.step) - 1)
    inset = 0.03 * (top - bottom)
    axes.plot(
        train.step[last],
        np.clip(train.mean[last], bottom + inset, top - inset),
        color=_colour(place),
        marker="X" if diverged else "o",
        ms=10 if diverged else 6,
        mfc=_colour(place) if diverged else "white",
        mec="white" if diverged else _colour(place),
        zorder=5,
    )


def _set_title(axes: Axes, text: str, *, above: str = "") -> None:
    """A title that keeps to its panel's width."""
    width = int(axes.bbox.width / axes.figure.dpi * 11)
    lines = [*textwrap.wrap(above, width), *textwrap.wrap(text, width)]
    axes.set_title("\n".join(lines), loc="left", fontsize=10)


def _draw_legend(figure: Figure, report: Report) -> None:
    """The arms above the panels, and below them what the other marks mean."""
    arms = [(arm, group) for group in report.groups for arm in group.arms]
    drawn = {arm.label for arm, group in arms if arm.compared or _loose(arm, group)}
    handles = [
        Line2D(
            [],
            [],
            color=_colour(place),
            ls=_line(place),
            lw=2,
            marker=MARKERS[place % len(MARKERS)],
            ms=6,
            mec="white",
            mew=0.5,
            label=label if label in drawn else f"{label} (no runs)",
        )
        for place, label in enumerate(report.labels)
    ]
    loose = [run.status for arm, group in arms for run in _loose(arm, group)]
    keys = [Line2D([], [], color="#777777", lw=0.8, alpha=0.5, label="training loss")]
    if any(arm.num_seeds > 1 for arm, _ in arms):
        keys.append(
            Line2D([], [], color="#777777", lw=7, alpha=0.25, label="least to greatest seed")
        )
    if any(_is_compared(group) and group.noise is not None for group in report.groups):
        keys.append(
            Line2D(
                [],
                [],
                color="#555555",
                marker="|",
                ms=9,
                mew=1.2,
                ls="",
                label="± standard deviation of the reference's seeds",
            )
        )
    if "diverged" in loose:
        keys.append(
            Line2D([], [], color="#777777", marker="X", ms=8, mec="white", ls="", label="diverged")
        )
    if set(loose) - {"diverged"}:
        keys.append(
            Line2D([], [], color="#777777", marker="o", ms=6, mfc="white", ls="", label="stopped")
        )
    longest = max(len(label) for label in report.labels)
    fitting = int(figure.get_figwidth() * 13.5 / (longest + 6))
    style = {"frameon": False, "handlelength": 2.4, "columnspacing": 1.6}
    figure.legend(handles=handles, loc="outside upper left", ncols=max(1, fitting), **style)
    figure.legend(
        handles=keys, loc="outside lower left", ncols=len(keys), labelcolor="#555555", **style
    )


def _loose(arm: ArmResult, group: Group) -> list[ReportedRun]:
    """The runs of the arm that are drawn on their own: not completed, but with rows."""
    return [
        run
        for run in arm.judged
        if run.status != "completed"
        and run.directory not in group.evidence.refused
        and run.curve is not None
        and len(run.curve.step)
    ]


def _is_compared(group: Group) -> bool:
    return group.reference is not None and len(group.arms) > 1


def _limits(values: Floats, *, pad: float) -> tuple[float, float]:
    """Limits of an axis that hold the values, with a share of their range to spare."""
    low, high = float(values.min()), float(values.max())
    spare = pad * (high - low) or pad * abs(high) or 1.0
    return low - spare, high + spare


def _late(band: Band, values: Floats) -> Floats:
    """The values without the early ones, which would squash the others if they set the limits."""
    return values[band.step >= EARLY * band.step.max(initial=0)]


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _line(place: int) -> str:
    return ("-", "--", ":")[place // len(COLOURS) % 3]
