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
    reached = [_first_reached(mine, other) for mine, other in pairs]
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
    losses = evaluations(curve)
    return float(np.mean(losses[-math.ceil(len(losses) / 10) :])) if len(losses) else None


def evaluations(curve: Curve) -> NDArray[np.float64]:
    """The finite eval losses that were measured, in the order of their steps."""
    return curve.eval_loss[np.isfinite(curve.eval_loss)]


def _first_reached(curve: Curve, reference: Curve) -> tuple[float, float]:
    """The tokens and seconds at which the curve reached the reference's last eval loss."""
    targets = evaluations(reference)[-1:]
    if not len(targets):
        return math.inf, math.inf
    reached = np.flatnonzero(curve.eval_loss <= targets)
    if not len(reached):
        return math.inf, math.inf
    return float(curve.tokens[reached[0]]), float(curve.seconds[reached[0]])
