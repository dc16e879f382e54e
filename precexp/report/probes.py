"""The numerics probes of an arm: what they are, their means over seeds, and what these come to."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from precexp.report.build import ArmResult, Group, Report
from precexp.report.curves import Band, Floats, band_over
from precexp.report.read import ReportedRun, block, number

# Parameter kinds in the order in which they are drawn: `all` lies on top.
KINDS = ("embedding", "attention", "mlp", "bias", "norm", "all")
# Of a weight, at most, as a share of it: a power of two, by the dtype that is stored.
HALF_ULPS = {"bfloat16": -9, "float16": -12, "float32": -25}
HALF_ULP = 2.0 ** HALF_ULPS["bfloat16"]
# What a number may be without a word about it. A healthy arm is well inside: a bf16 variance that
# is rounded stochastically is within 0.97 and 1.03, a decay inside the compensation within 0.98 and
# 1.02 (docs/numerics.md).
LEAST_DECAY, MOST_DECAY = 0.8, 1.25
LEAST_VARIANCE, MOST_VARIANCE = 0.8, 1.25
LEAST_UPDATE = 0.9
MOST_UNDERFLOW = 0.01
LATE = 0.25  # the share of the probed steps that are the end of a run


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A probe as it is drawn."""

    name: str  # in metrics.jsonl, before the kind
    title: str
    logarithmic: bool = False
    lines: tuple[tuple[float, str], ...] = ()  # thresholds: where, and in words
    band: tuple[float, float] | None = None  # where nothing is said about it
    limits: tuple[float, float] = (0.0, 1.0)  # of the axis at least
    bounds: tuple[float, float] = (-0.5, 2.5)  # of the axis at most


PROBES = (
    Probe(name="moved", title="weights that moved"),
    Probe(
        name="update_kept",
        title="update kept by the weight",
        lines=((1.0, "1: all of it"),),
        limits=(0.0, 1.1),
    ),
    Probe(
        name="update_kept_compensated",
        title="update kept with compensation",
        lines=((1.0, "1: all of it"),),
        band=(LEAST_UPDATE, 2 - LEAST_UPDATE),
        limits=(0.0, 1.2),
    ),
    Probe(
        name="decay_kept",
        title="decay kept",
        lines=((1.0, "1: all of it"),),
        band=(LEAST_DECAY, MOST_DECAY),
        limits=(0.0, 1.3),
    ),
    Probe(
        name="variance_ratio",
        title="variance / its fp32 shadow",
        logarithmic=True,
        lines=((1.0, "1: unbiased"),),
        band=(LEAST_VARIANCE, MOST_VARIANCE),
        limits=(0.5, 2.0),
        bounds=(1e-3, 1e4),
    ),
    Probe(
        name="update_to_weight",
        title="update / weight, RMS",
        logarithmic=True,
        lines=((HALF_ULP, "2^-9: half a bf16 unit"),),
        limits=(1e-4, 4e-3),
        bounds=(1e-9, 1e2),
    ),
    Probe(
        name="gradient_underflow",
        title="gradients that underflowed",
        lines=((MOST_UNDERFLOW, "flagged above"),),
        limits=(0.0, 0.05),
    ),
    Probe(name="gradient_overflow", title="gradients that overflowed", limits=(0.0, 0.05)),
)
BY_NAME = {probe.name: probe for probe in PROBES}


@dataclass(frozen=True, kw_only=True, eq=False)
class ArmProbes:
    """An arm of a group and what was probed in its runs."""

    arm: ArmResult
    group: Group
    number: int  # among the arms of all groups, from 1
    runs: Sequence[ReportedRun]  # whose probes count

    @property
    def name(self) -> str:
        """Of the arm, in a table."""
        title = f" ({self.group.title})" if self.group.title else ""
        return f"`{self.arm.label}`{title}"

    @property
    def picture(self) -> str:
        """The file of its small multiples."""
        return f"numerics-{self.number}.svg"

    @cached_property
    def bands(self) -> Mapping[tuple[str, str], Band]:
        """Mean over the runs by probe and kind, at the steps where all of them have it."""
        curves = [run.curve for run in self.runs if run.curve is not None]
        keys = dict.fromkeys(key for curve in curves for key in curve.probes)
        bands = {
            (key.partition("/")[0], key.partition("/")[2]): band_over(
                [(c.probes[key].step, c.probes[key].values) for c in curves if key in c.probes]
            )
            for key in keys
        }
        return {key: band for key, band in bands.items() if len(band.step)}

    def level(self, probe: str, kind: str = "all") -> float | None:
        """The median over the steps; None if it was not measured.

        A step's decay counts by its learning rate: where that goes to zero, next to nothing was
        asked.
        """
        values = self._values(probe, kind)
        return _weighted_median(values, self._weights(probe, kind)) if len(values) else None

    def late(self, probe: str, kind: str = "all") -> float | None:
        """The median over the last quarter of the steps; None if it was not measured."""
        values = self._values(probe, kind, late=True)
        return float(np.median(values)) if len(values) else None

    def spare(self, probe: str, kind: str = "all", *, late: bool = False) -> float:
        """How far the median may be beyond a threshold for no more reason than noise.

        Twice its standard error: where lr is small, what random roundings keep of a single step is
        noisy. Judged by the changes from step to step, so that a trend is no noise.
        """
        values = self._values(probe, kind, late=late)
        if len(values) < 3:
            return 0.0
        weights = self._weights(probe, kind)[-len(values) :]
        changes, count = np.diff(values), np.minimum(weights[1:], weights[:-1])
        trend = np.average(changes, weights=count)
        noise = math.sqrt(np.average((changes - trend) ** 2, weights=count) / 2)
        num_steps = weights.sum() ** 2 / np.square(weights).sum()  # of equal weight
        return 2 * 1.25 * noise / math.sqrt(num_steps)

    def _values(self, probe: str, kind: str, *, late: bool = False) -> Floats:
        band = self.bands.get((probe, kind))
        if band is None:
            return np.empty(0)
        return band.mean[band.step >= band.step[-1] * (1 - LATE)] if late else band.mean

    def _weights(self, probe: str, kind: str) -> Floats:
        """How much each of the steps counts in `level`."""
        steps = self.bands[probe, kind].step
        curve = next(run.curve for run in self.runs if run.curve is not None)
        lr = curve.lr[np.searchsorted(curve.step, steps)]
        told = np.isfinite(lr).all() and np.minimum(lr[1:], lr[:-1]).any()
        return lr if probe == "decay_kept" and told else np.ones(len(steps))

    def total(self, probe: str, kind: str = "") -> float:
        """The sum over the probed steps, of a count; 0 where it was not measured."""
        band = self.bands.get((probe, kind))
        return 0.0 if band is None else float(np.sum(band.mean))

    def value(self, section: str, key: str) -> object:
        """A value of the arm's config."""
        config = next((run.record.config for run in self.runs if run.record is not None), {})
        return block(config, section).get(key)

    def setting(self, key: str) -> float:
        """A number of the config's `train` block; 0 where there is none."""
        config = next((run.record.config for run in self.runs if run.record is not None), {})
        return number(block(config, "train"), key) or 0.0


def _weighted_median(values: Floats, weights: Floats) -> float:
    """The mean of the least and greatest value with half of the weight, or less, on either side."""
    order = np.argsort(values)
    ordered, below = values[order], np.cumsum(weights[order])
    half = below[-1] / 2
    slack = 1e-9 * half  # sums are rounded
    least, greatest = np.searchsorted(below, (half - slack, half + slack))
    return float((ordered[least] + ordered[greatest]) / 2)


def probed_arms(report: Report) -> list[ArmProbes]:
    """The arms of all groups that have probes.

    Completed runs count; where there is none, all that were probed.
    """
    return [found for found in _arms(report) if found.bands]


def _arms(report: Report) -> Iterator[ArmProbes]:
    count = 0
    for group in report.groups:
        for arm in group.arms:
            count += 1
            completed = [run for run in arm.compared.values() if has_probes(run)]
            others = [run for run in arm.judged if run.directory not in group.evidence.refused]
            runs = completed or [run for run in others if has_probes(run)]
            yield ArmProbes(arm=arm, group=group, number=count, runs=runs)


def has_probes(run: ReportedRun) -> bool:
    """Whether anything was probed in the run."""
    return run.curve is not None and bool(run.curve.probes)
