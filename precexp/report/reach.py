"""How far an arm had to train to reach the reference's final eval loss."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from precexp.report.read import Curve


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Means over the seeds that can be paired; infinite if one of them never reached the loss."""

    num_seeds: int
    num_reached: int
    tokens: float
    seconds: float  # of training, evaluations not counted


def reach_of(pairs: Iterable[tuple[Curve, Curve]]) -> Reach | None:
    """Over pairs of an arm's curve and the reference's of the same seed; None without a pair.

    An arm has reached the loss at its first evaluation that is not above the reference's last one.
    """
    reached = [
        _first_reached(mine, float(evaluations(other)[-1]))
        for mine, other in pairs
        if len(mine.step) and len(evaluations(other))  # else it was not measured
    ]
    if not reached:
        return None
    return Reach(
        num_seeds=len(reached),
        num_reached=sum(math.isfinite(tokens) for tokens, _ in reached),
        tokens=float(np.mean([tokens for tokens, _ in reached])),
        seconds=float(np.mean([seconds for _, seconds in reached])),
    )


def last_tenth(curve: Curve) -> float | None:
    """The mean eval loss over the last 10 % of the evaluations, at least one; None without any."""
    return _late_mean(evaluations(curve))


def late_difference(curve: Curve, reference: Curve) -> float | None:
    """The difference in `last_tenth` over the evaluations that both have; None without any."""
    _, here, there = np.intersect1d(curve.step, reference.step, return_indices=True)
    gap = curve.eval_loss[here] - reference.eval_loss[there]
    even = curve.tokens[here] == reference.tokens[there]
    return _late_mean(gap[np.isfinite(gap) & even])


def evaluations(curve: Curve) -> NDArray[np.float64]:
    """The finite eval losses that were measured, in the order of their steps."""
    return curve.eval_loss[np.isfinite(curve.eval_loss)]


def _late_mean(values: NDArray[np.float64]) -> float | None:
    return float(np.mean(values[-math.ceil(len(values) / 10) :])) if len(values) else None


def _first_reached(curve: Curve, target: float) -> tuple[float, float]:
    """The tokens and seconds at which the curve was first at the loss or below."""
    reached = np.flatnonzero(curve.eval_loss <= target)
    if not len(reached):
        return math.inf, math.inf
    return float(curve.tokens[reached[0]]), float(curve.seconds[reached[0]])
