"""The probes' formulae: each is a sum over a sum, or the root of that.

Symbols, per sampled element of a parameter that has a gradient in the step: g the gradient as the
optimizer gets it (unscaled, clipped); w the stored weight, c its compensation (0 where there is
none), x = w + c; m, v the stored moments; primes are for after the step; t counts the applied
steps, this one included. The exact update, in float64 from what is stored before the step, is

    u = -lr weight_decay x - lr (m1 / (1 - beta1^t)) / (sqrt(v1 / (1 - beta2^t)) + eps),
    m1 = beta1 m + (1 - beta1) g,  v1 = beta2 v + (1 - beta2) g^2

so what earlier steps lost of m and v is no part of this step's loss. Sums go over a kind's
elements; in `all`, each kind's sums count by its number of parameters over that of its elements.

    moved                     mean of (w' != w)
    update_kept               sum (w' - w) u / sum u^2
    update_kept_compensated   sum (x' - x) u / sum u^2; only with a compensation
    decay_kept                sum D d / sum d^2, d = -lr weight_decay x, D the difference that the
                              decay makes in what is stored (precexp.numerics.decay)
    variance_ratio            sum v' / sum s', s the float32 shadow: s' = beta2 s + (1 - beta2) g^2
    update_to_weight          sqrt(sum u^2 / sum x^2)
    gradient_underflow        mean of (|g| < smallest normal number of g's dtype), over the elements
                              of matrices in whose row and in whose column not all g are 0
    gradient_overflow         mean of (g is not finite); both of g unscaled but not yet clipped
    loss_scale_backoffs       skipped steps after the last probe's; it has no kind

A quotient by 0 is not measured and has no key; the NaN of weights that are NaN is measured.
Standard deviations, with n elements of a kind (at most `sample.MOST_PER_KIND`): of a fraction at
most 0.5 / sqrt(n); of update_kept about q / (u sqrt(12 n)), where a weight's neighbours are q
apart and updates are u (in a single step, what a compensation holds back comes to the weights in
lumps); of decay_kept `decay.noise`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from precexp.numerics.arithmetic import true_variance
from precexp.numerics.sample import Site


@dataclass(frozen=True)
class Quotient:
    """The sum of the numerators over that of the denominators, `[n]` both."""

    numerators: Tensor
    denominators: Tensor
    of_squares: bool = False  # then its root


def measured(quotients: Mapping[str, Quotient], sites: Sequence[Site]) -> dict[str, float]:
    """Each quotient of each kind and of `all`, as <probe>/<kind>; not those by 0."""
    lengths: dict[str, int] = {}
    for site in sites:
        lengths[site.kind] = lengths.get(site.kind, 0) + site.count
    weights = {site.kind: site.weight for site in sites}
    sums = torch.stack(
        [
            part.sum(dtype=torch.float64)
            for quotient in quotients.values()
            for values in (quotient.numerators, quotient.denominators)
            for part in values.split(list(lengths.values()))
        ]
    )
    numbers = iter(sums.tolist())
    found: dict[str, float] = {}
    for probe, quotient in quotients.items():
        over = {kind: next(numbers) for kind in lengths}
        under = {kind: next(numbers) for kind in lengths}
        over["all"] = sum(weights[kind] * over[kind] for kind in lengths)
        under["all"] = sum(weights[kind] * under[kind] for kind in lengths)
        for kind in over:
            if under[kind] != 0:
                value = over[kind] / under[kind]
                found[f"{probe}/{kind}"] = value**0.5 if quotient.of_squares else value
    return found


def exact_update(
    states: Mapping[str, Tensor], weight: Tensor, grad: Tensor, *, group: Mapping, num_steps: int
) -> Tensor:
    """u in float64 `[n]`, of elements that have taken so many steps; without states, m = v = 0.

    `weight` is x, the states are the stored ones, the group has the optimizer's options.
    """
    beta1, beta2 = group["betas"]
    t = num_steps + 1
    g = grad.double()
    m, v = torch.zeros_like(g), torch.zeros_like(g)
    if "exp_avg" in states:
        m, v = states["exp_avg"].double(), variance_of(states).double()
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    root = (v / (1 - beta2**t)).sqrt()
    adam = group["lr"] * (m / (1 - beta1**t)) / (root + group["eps"])
    return -group["lr"] * group["weight_decay"] * weight - adam


def of_gradients(gradient: Tensor, sites: Sequence[Site]) -> dict[str, Quotient]:
    """Underflow and overflow of the sites' gradients, of which these are the sampled elements."""
    is_small = gradient.abs() < torch.finfo(gradient.dtype).smallest_normal
    parts = is_small.split([site.count for site in sites])
    in_use = torch.cat([_in_use(site, part) for site, part in zip(sites, parts, strict=True)])
    return {
        "gradient_underflow": Quotient(is_small & in_use, in_use),
        "gradient_overflow": Quotient(~gradient.isfinite(), torch.ones_like(is_small)),
    }


def variance_of(states: Mapping[str, Tensor]) -> Tensor:
    """The second moment as it is stored, in float32."""
    return true_variance(states["exp_avg_sq"], states.get("compensation"))


def _in_use(site: Site, is_small: Tensor) -> Tensor:
    """Which of the site's elements are in a row and a column of the gradient that are not all 0.

    An embedding's row of a token that is not in the batch is not, nor what a dead unit leads to. Of
    a vector nothing is: there, the 0 of a dead unit's bias looks like any other.
    """
    grad = site.param.grad
    assert grad is not None
    if grad.ndim < 2:
        return torch.zeros_like(is_small)
    if not is_small.any():  # a number that is not 0 has neither: spares reading the whole gradient
        return torch.ones_like(is_small)
    matrix = grad.flatten(1)
    rows, columns = (torch.linalg.vector_norm(matrix, torch.inf, dim=dim) != 0 for dim in (1, 0))
    width = matrix.shape[1]
    return rows[site.places // width] & columns[site.places % width]
