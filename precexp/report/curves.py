"""Loss curves as arrays: over the seeds of an arm, against the reference, thinned for the eye."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from precexp.report.build import ArmResult
from precexp.report.read import Curve

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
EARLY = 0.1  # the share of the steps whose values do not set the limits of an axis
NUM_BUCKETS = 300  # about one per two pixels of a panel


@dataclass(frozen=True, kw_only=True, eq=False)
class Band:
    """A mean over seeds and the range around it, at the steps where all of them have a value."""

    step: Steps
    mean: Floats
    low: Floats
    high: Floats


def train_band(curves: Sequence[Curve]) -> Band:
    """The training loss of each step over the runs, in nats per token."""
    return band_over([(curve.step, curve.loss) for curve in curves])


def eval_band(curves: Sequence[Curve]) -> Band:
    """The eval loss over the runs, in nats per token."""
    return band_over([(curve.step, curve.eval_loss) for curve in curves])


def difference_band(arm: ArmResult, reference: ArmResult) -> Band:
    """The seed-paired differences of eval loss, arm minus reference; empty without a pair.

    Only where both had been served as many tokens by that step.
    """
    pairs = []
    for seed in sorted(arm.compared.keys() & reference.compared.keys()):
        mine, other = arm.compared[seed].curve, reference.compared[seed].curve
        if mine is not None and other is not None:
            step, here, there = np.intersect1d(mine.step, other.step, return_indices=True)
            gap = mine.eval_loss[here] - other.eval_loss[there]
            pairs.append((step, np.where(mine.tokens[here] == other.tokens[there], gap, np.nan)))
    return band_over(pairs)


def band_over(series: Sequence[tuple[Steps, Floats]]) -> Band:
    """Mean, least and greatest at the steps where every series has a finite value."""
    finite = [(step[np.isfinite(values)], values[np.isfinite(values)]) for step, values in series]
    common = finite[0][0] if finite else np.empty(0, dtype=np.int64)
    for step, _ in finite[1:]:
        common = np.intersect1d(common, step)
    if not len(common):
        empty = np.empty(0)
        return Band(step=common, mean=empty, low=empty, high=empty)
    values = np.stack([value[np.searchsorted(step, common)] for step, value in finite])
    return Band(
        step=common, mean=values.mean(axis=0), low=values.min(axis=0), high=values.max(axis=0)
    )


def thin(band: Band, *, num_buckets: int = NUM_BUCKETS) -> Band:
    """At most two steps per bucket, those of its least and greatest mean: no spike is lost."""
    if len(band.step) <= 2 * num_buckets:
        return band
    kept = []
    for bucket in np.array_split(np.arange(len(band.step)), num_buckets):
        mean = band.mean[bucket]
        kept += sorted({int(bucket[mean.argmin()]), int(bucket[mean.argmax()])})
    return Band(
        step=band.step[kept], mean=band.mean[kept], low=band.low[kept], high=band.high[kept]
    )
