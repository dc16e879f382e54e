"""What the interactive charts of report.html draw: curves as JSON, thinned for the eye."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from precexp.report.build import ArmResult, Group, Report
from precexp.report.curves import (
    EARLY,
    Band,
    Floats,
    band_over,
    difference_band,
    eval_band,
    train_band,
)
from precexp.report.memory import CATEGORIES, peak_categories
from precexp.report.palette import CATEGORY_COLOURS, COLOURS, colour_of
from precexp.report.read import Curve, ReportedRun
from precexp.report.tables import MIB, address_of, percent

NUM_BUCKETS = 500  # of a curve, each with its least and its greatest value
MOST_WHOLE = 2 * NUM_BUCKETS  # a curve of so many points is not thinned
MOST_SEEDS_DRAWN = 24  # runs beyond which the seeds' own lines are off until asked for
DASHES = ("solid", "dash", "dot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")
DARK = {"#000000": "#E8EAED"}  # black ink is white on a dark page; the others are seen on both

Json = Mapping[str, object]
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How an arm looks in every chart."""

    colour: str
    dark: str  # the colour on a dark page
    dash: str
    symbol: str


def style_of(label: str, labels: Sequence[str]) -> Style:
    """By the arm's place among the labels of all arms, as in the static figures."""
    place = labels.index(label)
    colour = colour_of(label, labels)
    return Style(
        colour=colour,
        dark=DARK.get(colour, colour),
        dash=DASHES[place // len(COLOURS) % len(DASHES)],
        symbol=SYMBOLS[place % len(SYMBOLS)],
    )


def charts_of(data: Json) -> list[list[str]]:
    """The charts that each group of `chart_data` has something for."""
    groups = data["groups"]
    assert isinstance(groups, list)
    return [group["charts"] for group in groups]


def chart_data(report: Report, output: Path) -> Json:
    """All that the charts draw; links to runs are relative to `output`."""
    curves = [run.curve for run in report.runs if run.curve is not None]
    first_rows = np.cumsum([0, *(len(group.arms) for group in report.groups)]).tolist()
    return {
        "arms": [
            {"label": label, **vars(style_of(label, report.labels))} for label in report.labels
        ],
        "groups": [
            _group(group, report, output, first_row)
            for group, first_row in zip(report.groups, first_rows, strict=False)
        ],
        "memory": _memory(report),
        "seeds": len(report.runs) <= MOST_SEEDS_DRAWN,
        "seconds": any(np.isfinite(curve.seconds).any() for curve in curves),
    }


def to_script(data: Json) -> str:
    """The data as JSON that is safe inside a <script>: no `<` can end it or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def thin_indices(values: Floats, *, num_buckets: int = NUM_BUCKETS) -> Indices:
    """Where to look at a curve: each bucket's least and greatest value, and the first gap in it.

    The first and the last point are kept, and all of them if there are few.
    """
    count = len(values)
    if count <= 2 * num_buckets:
        return np.arange(count)
    finite = np.isfinite(values)
    width = -(-count // num_buckets)
    starts = np.arange(0, count, width)
    pad = len(starts) * width - count
    least = np.pad(np.where(finite, values, np.inf), (0, pad), constant_values=np.inf)
    greatest = np.pad(np.where(finite, values, -np.inf), (0, pad), constant_values=-np.inf)
    gaps = np.pad(~finite, (0, pad)).reshape(-1, width)
    kept = np.concatenate(
        [
            starts + least.reshape(-1, width).argmin(axis=1),
            starts + greatest.reshape(-1, width).argmax(axis=1),
            (starts + gaps.argmax(axis=1))[gaps.any(axis=1)],
            [0, count - 1],
        ]
    )
    return np.unique(kept)


def thin_band(band: Band) -> Band:
    """The band at `thin_indices` of its mean; its edges are the farthest ones of each bucket."""
    kept = thin_indices(band.mean)
    if len(kept) == len(band.step):
        return band
    width = -(-len(band.step) // NUM_BUCKETS)
    starts = np.arange(0, len(band.step), width)
    buckets = kept // width
    return Band(
        step=band.step[kept],
        mean=band.mean[kept],
        low=np.minimum.reduceat(band.low, starts)[buckets],
        high=np.maximum.reduceat(band.high, starts)[buckets],
    )


def is_loose(run: ReportedRun, arm: ArmResult, group: Group) -> bool:
    """Whether the run is drawn on its own: it did not complete with a finite loss, but has rows."""
    failed = run.status != "completed" or run in arm.diverged.values()
    drawable = run.curve is not None and len(run.curve.step) > 0
    return failed and drawable and run.directory not in group.evidence.refused


def _group(group: Group, report: Report, output: Path, first_row: int) -> Json:
    """`first_row` is the number of the group's first arm among all arms of all groups."""
    reference = group.arms[0] if group.reference is not None else None
    runs = [
        (arm, run, run.curve, loose)
        for arm in group.arms
        for run in arm.judged
        if (loose := is_loose(run, arm, group)) or run in arm.compared.values()
        if run.curve is not None
    ]
    bands = {arm.label: _bands(arm, reference) for arm in group.arms}
    ranges = {
        kind: _limits([found[kind] for found in bands.values()])
        for kind in ("eval", "train", "grad")
    }
    loose = [train_band([curve]) for _, _, curve, is_alone in runs if is_alone]
    for kind in ("eval", "train"):  # only without a completed run may others set the limits
        ranges[kind] = ranges[kind] or _limits([_below_its_start(band) for band in loose])
    ranges["gap"] = _limits(
        [found["gap"] for found in bands.values()],
        also=[x for edge in (group.margin, group.noise) if edge is not None for x in (-edge, edge)],
        pad=0.18,
    )
    drawn = [
        _run(run, curve, arm=report.labels.index(arm.label), loose=loose, ranges=ranges)
        | {"link": address_of(run.directory, output)}
        for arm, run, curve, loose in runs
    ]
    numbers = {run.directory: i for i, (_, run, _, _) in enumerate(runs)}
    arms = [
        _arm(arm, reference, bands[arm.label], numbers)
        | {"arm": report.labels.index(arm.label), "rows": first_row + i}
        for i, arm in enumerate(group.arms)
    ]
    has_gap = any(len(found["gap"].step) for found in bands.values())
    charts = [
        kind
        for kind, shown in (
            ("eval", any(run["eval"] or run["loose"] for run in drawn)),
            ("gap", has_gap),
            ("train", any(run["train"] for run in drawn)),
            ("grad", any(run["grad"] for run in drawn)),
            ("scale", any(run["scale"] for run in drawn)),
        )
        if shown
    ]
    return {
        "margin": _rounded([group.margin])[0] if group.margin is not None else None,
        "marginText": f"margin ±{percent(report.margin)}",
        "noise": _rounded([group.noise])[0] if group.noise is not None else None,
        "charts": charts,
        "ranges": {kind: _rounded(limits) if limits else None for kind, limits in ranges.items()},
        "arms": arms,
        "runs": drawn,
    }


def _bands(arm: ArmResult, reference: ArmResult | None) -> dict[str, Band]:
    curves = [run.curve for run in arm.compared.values() if run.curve is not None]
    nothing = band_over([])
    return {
        "eval": eval_band(curves),
        "train": train_band(curves),
        "grad": band_over([(curve.step, curve.grad_norm) for curve in curves]),
        "gap": nothing
        if reference is None or arm is reference
        else difference_band(arm, reference),
    }


def _arm(
    arm: ArmResult,
    reference: ArmResult | None,
    bands: Mapping[str, Band],
    numbers: Mapping[Path, int],
) -> dict[str, object]:
    """The means of an arm with their bands, and the difference to the reference seed by seed."""
    curves = [run.curve for run in arm.compared.values() if run.curve is not None]
    gaps = []
    if reference is not None and len(bands["gap"].step):
        for seed in sorted(arm.compared.keys() & reference.compared.keys()):
            one = replace(arm, compared={seed: arm.compared[seed]})
            band = difference_band(one, reference)
            if len(band.step):
                own = arm.compared[seed].curve
                assert own is not None  # or there would be no difference
                gaps.append(
                    {
                        "run": numbers[arm.compared[seed].directory],
                        **_at(thin_band(band).step, [own]),
                        "y": _rounded(thin_band(band).mean),
                    }
                )
    return {
        "numRuns": len(curves),
        **{kind: _band(band, curves) for kind, band in bands.items()},
        "gaps": gaps,
    }


def _band(band: Band, curves: Sequence[Curve]) -> Json | None:
    if not len(band.step):
        return None
    thinned = thin_band(band)
    found: dict[str, object] = {
        **_at(thinned.step, curves),
        "mean": _rounded(thinned.mean),
        "low": _rounded(thinned.low),
        "high": _rounded(thinned.high),
    }
    if len(thinned.step) < len(band.step):
        # Extremes are for the eye; an average over them would be one of outliers.
        starts = np.arange(0, len(band.step), -(-len(band.step) // NUM_BUCKETS))
        sizes = np.diff(np.append(starts, len(band.step)))
        found["buckets"] = {
            **_at(band.step[starts + sizes // 2], curves),
            "mean": _rounded(np.add.reduceat(band.mean, starts) / sizes),
        }
    return found


def _run(
    run: ReportedRun,
    curve: Curve,
    *,
    arm: int,
    loose: bool,
    ranges: Mapping[str, Sequence[float] | None],
) -> dict[str, object]:
    diverged = run.status in ("diverged", "completed")
    return {
        "arm": arm,
        "seed": run.seed,
        "status": run.status,
        "loose": loose,
        "diverged": loose and diverged,
        "eval": _series(curve, curve.eval_loss, gaps=False),
        "train": _series(curve, curve.loss, gaps=True),
        "grad": _series(curve, curve.grad_norm, gaps=False),
        "scale": _scale(curve),
        "skipped": _skipped(curve),
        "ends": {kind: _end(curve, ranges[kind]) for kind in ("eval", "train")} if loose else None,
    }


def _series(curve: Curve, values: Floats, *, gaps: bool) -> Json | None:
    """The values that are finite; with `gaps` the others inside as null, where the line breaks."""
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return None
    shown = np.arange(finite[0], finite[-1] + 1) if gaps else finite
    kept = shown[thin_indices(values[shown])]
    return {**_at(curve.step[kept], [curve]), "y": _rounded(values[kept])}


def _scale(curve: Curve) -> Json | None:
    """The loss scale where it changes: between, it stays."""
    finite = np.flatnonzero(np.isfinite(curve.loss_scale))
    if not len(finite):
        return None
    values = curve.loss_scale[finite]
    changes = np.flatnonzero(np.diff(values)) + 1
    shown = finite[np.unique(np.append(changes, [0, len(finite) - 1]))]
    kept = shown[thin_indices(curve.loss_scale[shown])]
    return {**_at(curve.step[kept], [curve]), "y": _rounded(curve.loss_scale[kept])}


def _skipped(curve: Curve) -> Json | None:
    """The skipped steps, at the loss scale that was too large."""
    skipped = np.flatnonzero(curve.skipped & np.isfinite(curve.loss_scale))
    if not len(skipped):
        return None
    kept = skipped[:: -(-len(skipped) // MOST_WHOLE)]
    return {**_at(curve.step[kept], [curve]), "y": _rounded(curve.loss_scale[kept])}


def _end(curve: Curve, limits: Sequence[float] | None) -> Json | None:
    """Where a run that did not complete is marked: at its end, or where it left the panel."""
    finite = np.flatnonzero(np.isfinite(curve.loss))
    if not len(finite):
        return None
    values = curve.loss[finite]
    bottom, top = limits or (float(values.min()), float(values.max()))
    last = min(int(np.flatnonzero(values <= top).max(initial=-1)) + 1, len(finite) - 1)
    inset = 0.03 * (top - bottom)
    inside = np.clip(values[last], bottom + inset, top - inset)
    return {
        **_at(curve.step[finite[[last]]], [curve]),
        "y": _rounded([inside if limits else values[last]]),
    }


def _at(steps: Sequence[int] | Indices, curves: Sequence[Curve]) -> dict[str, object]:
    """The three abscissae of some steps: tokens and seconds as means over the curves with these.

    `tokens` is one number, the tokens of a step, where every step was served as many.
    """
    step = np.asarray(steps)
    having = [curve for curve in curves if np.isin(step, curve.step).all()]
    places = [np.searchsorted(curve.step, step) for curve in having]
    tokens = np.mean([c.tokens[i] for c, i in zip(having, places, strict=True)], axis=0)
    seconds = np.mean([c.seconds[i] for c, i in zip(having, places, strict=True)], axis=0)
    per_step = tokens[0] / step[0] if step[0] else 0
    even = np.array_equal(tokens, per_step * step)
    return {
        "step": step.tolist(),
        "tokens": int(per_step) if even and per_step == int(per_step) else _rounded(tokens),
        "seconds": _rounded(seconds),
    }


def _below_its_start(band: Band) -> Band:
    """A loss above where it began is one that diverges: that part may leave the panel."""
    if not len(band.step):
        return band
    top = band.mean[0]
    return replace(band, low=band.low.clip(max=top), high=band.high.clip(max=top))


def _limits(
    bands: Sequence[Band], *, also: Sequence[float] = (), pad: float = 0.05
) -> list[float] | None:
    """Limits of an axis that hold the bands but for their early part; None of nothing."""
    late = [band.step >= EARLY * band.step.max(initial=0) for band in bands]
    values = np.concatenate(
        [
            np.asarray(also, dtype=np.float64),
            *(band.low[kept] for band, kept in zip(bands, late, strict=True)),
            *(band.high[kept] for band, kept in zip(bands, late, strict=True)),
        ]
    )
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    spare = pad * (high - low) or pad * abs(high) or 1.0
    return [low - spare, high + spare]


def _memory(report: Report) -> Json | None:
    """What each arm's peak is made of, in MiB by category."""
    found = peak_categories(report)
    if not found:
        return None
    places = {  # by the names that peak_categories gives
        (f"{arm.label} ({group.title})" if group.title else arm.label).replace("`", ""): place
        for group in report.groups
        for arm in group.arms
        for place in [report.labels.index(arm.label)]
    }
    keys = [key for key in CATEGORIES if any(sizes.get(key, 0) > 0 for sizes in found.values())]
    return {
        "bars": [{"name": name, "arm": places.get(name)} for name in found],
        "categories": [
            {
                "words": CATEGORIES[key],
                "colour": CATEGORY_COLOURS[key],
                "mib": _rounded([max(sizes.get(key, 0), 0) / MIB for sizes in found.values()]),
            }
            for key in keys
        ],
    }


def _rounded(values: Sequence[float] | Floats) -> list[float | None]:
    """Six significant digits, enough for a chart; null where there is no finite number."""
    return [
        None
        if not math.isfinite(value)
        else int(short)
        if (short := float(f"{value:.6g}")).is_integer() and abs(short) < 1e15
        else short
        for value in (values.tolist() if isinstance(values, np.ndarray) else values)
    ]
