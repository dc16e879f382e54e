"""Probes: what of an update reaches the stored numbers, measured on a fixed sample.

Symbols, per sampled element of a parameter that has a gradient in the step: g the gradient as the
optimizer gets it (unscaled, clipped); w the stored weight, c its compensation (0 where there is
none), x = w + c; m, v the stored moments; primes are for after the step; t counts the applied
steps. The exact update, in float64 from what is stored before the step, is

    u = -lr weight_decay x - lr (m1 / (1 - beta1^t)) / (sqrt(v1 / (1 - beta2^t)) + eps),
    m1 = beta1 m + (1 - beta1) g,  v1 = beta2 v + (1 - beta2) g^2

so what earlier steps lost of m and v is no part of this step's loss. Sums go over a kind's
elements; in `all` each kind's sums count by its number of parameters over that of its elements.

    moved                     mean of (w' != w)
    update_kept               sum (w' - w) u / sum u^2
    update_kept_compensated   sum (x' - x) u / sum u^2
    decay_kept                sum D d / sum d^2, d = -lr weight_decay x, D the stored difference
                              that the decay makes (precexp.numerics.decay)
    variance_ratio            sum v' / sum s', s the float32 shadow: s' = beta2 s + (1 - beta2) g^2
    update_to_weight          sqrt(sum u^2 / sum x^2)
    gradient_underflow        mean of (|g| < smallest normal number of g's dtype), over the elements
                              of matrices in whose row and in whose column not all g are 0
    gradient_overflow         mean of (g is not finite); both of g unscaled but not yet clipped
    loss_scale_backoffs       skipped steps after the last probe's, without a kind

A quotient by 0 is not measured and has no key; NaN of weights that are NaN is measured.
Standard deviations, with n elements of a kind (16,384 in `MOST_PER_KIND`): of a fraction at most
0.5 / sqrt(n) = 0.004; of update_kept about q / (u sqrt(12 n)) where a weight's neighbours are q
apart and updates are u; of decay_kept `decay.noise`, and beyond 0.25 it has no key.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from precexp.config import OptimConfig
from precexp.numerics.arithmetic import Arithmetic, arithmetic_of, true_variance, true_weight
from precexp.numerics.decay import MOST_NOISE, Step, noise, stored_difference
from precexp.numerics.sample import Site, draw_sample

STATES = ("exp_avg", "exp_avg_sq", "compensation")


class Probing(Protocol):
    """What the training loop tells of each step, and gets back at those that are probed."""

    def before_update(self, step: int) -> None:
        """Between backward and optimizer step: gradients are unscaled, not clipped."""
        ...

    def after_update(self, step: int, *, skipped: bool) -> Mapping[str, float] | None:
        """After the optimizer step, while the gradients are alive; the probes where they are due.

        Only then the device is waited for.
        """
        ...

    def state(self) -> Mapping[str, Tensor]:
        """What a run needs to go on with the same probes."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes it up; where it is of another sample, or none, begins from the stored variance."""
        ...


class NoProbes:
    """Probes that are off."""

    def before_update(self, step: int) -> None:
        pass

    def after_update(self, step: int, *, skipped: bool) -> None:
        pass

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        pass


def build_probes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: OptimConfig,
    *,
    every: int | None,
    total_steps: int,
    seed: int,
    loss_scaling: bool,
) -> Probing:
    """Probes of the placed model every so many steps and at the last; none where `every` is None.

    Call `load` once before the first step.
    """
    if every is None:
        return NoProbes()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return Probes(
        optimizer,
        draw_sample(model, params, seed=seed),
        arithmetic_of(
            config,
            param_dtype=params[0].dtype,
            beta2=optimizer.param_groups[0]["betas"][1],
        ),
        every=every,
        total_steps=total_steps,
        loss_scaling=loss_scaling,
    )


@dataclass(frozen=True, kw_only=True)
class _Before:
    """The sample just before an update: tensors are `[n]`, over the sites in their order."""

    sites: Sequence[Site]  # whose parameters have a gradient
    weight: Tensor
    states: Mapping[str, Tensor]  # by name; empty before the first step of torch's optimizers
    num_steps: Sequence[int]  # applied so far, by site
    gradient: Tensor  # not clipped
    is_in_use: Tensor  # of the gradient: in a row and a column that are not all 0


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Sites after one another that take their step by the same numbers, and where they are."""

    where: slice
    kind: str
    group: Mapping
    num_steps: int  # applied before

    @property
    def decay_rate(self) -> float:
        return self.group["lr"] * self.group["weight_decay"]


class Probes:
    """Probes of one run's sample. What it reads it copies; it writes to nothing of the run's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sites: Sequence[Site],
        arithmetic: Arithmetic,
        *,
        every: int,
        total_steps: int,
        loss_scaling: bool,
    ) -> None:
        self._optimizer = optimizer
        self._sites = sites
        self._arithmetic = arithmetic
        self._every = every
        self._total_steps = total_steps
        self._loss_scaling = loss_scaling
        self._beta2 = optimizer.param_groups[0]["betas"][1]
        assert all(group["betas"][1] == self._beta2 for group in optimizer.param_groups)
        self._places = torch.cat([site.places for site in sites])
        self._shadow = torch.zeros(len(self._places), device=self._places.device)
        self._backoffs = 0
        self._before: _Before | None = None

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        if step % self._every == 0 or step == self._total_steps:
            self._before = self._read()

    @torch.no_grad()
    def after_update(self, step: int, *, skipped: bool) -> Mapping[str, float] | None:
        if skipped:
            self._backoffs += 1
        else:
            self._follow_variance()
        before, self._before = self._before, None
        if before is None:
            return None
        quotients = {**_of_gradients(before), **self._of_variance(before)}
        if not skipped:
            quotients |= self._of_update(before)
        found = _measured(quotients, before.sites)
        if self._loss_scaling:
            found["loss_scale_backoffs"] = float(self._backoffs)
        self._backoffs = 0
        return found

    def state(self) -> Mapping[str, Tensor]:
        return {
            "places": self._places,
            "shadow": self._shadow,
            "backoffs": torch.tensor(self._backoffs),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        if "places" in state and torch.equal(state["places"], self._places.cpu()):
            self._shadow.copy_(state["shadow"])
            self._backoffs = int(state["backoffs"])
            return
        for site in self._sites:
            stored = self._optimizer.state[site.param]
            if "exp_avg_sq" in stored:
                picked = {name: site.pick(stored[name]) for name in STATES if name in stored}
                self._shadow[site.where] = _variance_of(picked)

    def _read(self) -> _Before:
        sites = [site for site in self._sites if site.param.grad is not None]
        return _Before(
            sites=sites,
            weight=_pick(sites, [site.param for site in sites]),
            states=self._states_of(sites),
            num_steps=[int(self._optimizer.state[site.param].get("step", 0)) for site in sites],
            gradient=_pick(sites, _gradients(sites)),
            is_in_use=torch.cat([_is_in_use(site) for site in sites]),
        )

    def _states_of(self, sites: Sequence[Site]) -> dict[str, Tensor]:
        """The stored states of the sites' samples; none where one of the sites has none."""
        states = [self._optimizer.state[site.param] for site in sites]
        return {
            name: _pick(sites, [state[name] for state in states])
            for name in STATES
            if all(name in state for state in states)
        }

    def _follow_variance(self) -> None:
        """The shadow's step, by the gradients that the optimizer has just used."""
        sites = [site for site in self._sites if site.param.grad is not None]
        gradient = _pick(sites, _gradients(sites)).float()
        whole = len(sites) == len(self._sites)
        shadow = self._shadow if whole else torch.cat([self._shadow[s.where] for s in sites])
        shadow.mul_(self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
        if not whole:
            parts = shadow.split([len(site.places) for site in sites])
            for site, part in zip(sites, parts, strict=True):
                self._shadow[site.where] = part

    def _of_variance(self, before: _Before) -> dict[str, "_Quotient"]:
        states = self._states_of(before.sites)
        if "exp_avg_sq" not in states:
            return {}
        shadow = torch.cat([self._shadow[site.where] for site in before.sites])
        return {"variance_ratio": _Quotient(_variance_of(states), shadow)}

    def _of_update(self, before: _Before) -> dict[str, "_Quotient"]:
        """What became of the exact update."""
        gradient = _pick(before.sites, _gradients(before.sites))
        runs = list(self._runs(before))
        old = true_weight(before.weight, before.states.get("compensation"))
        exact = torch.cat([_exact_update(run, before, old, gradient) for run in runs])
        weight = _pick(before.sites, [site.param for site in before.sites])
        both_nan = weight.isnan() & before.weight.isnan()
        moved = (weight != before.weight) & ~both_nan
        stored = weight.double() - before.weight.double()
        quotients = {
            "moved": _Quotient(moved, torch.ones_like(moved)),
            "update_kept": _Quotient(stored * exact, exact**2),
            "update_to_weight": _Quotient(exact**2, old**2, of_squares=True),
            "decay_kept": self._of_decay(before, runs, old, gradient),
        }
        compensation = self._states_of(before.sites).get("compensation")
        if compensation is not None:
            kept = (true_weight(weight, compensation) - old) * exact
            quotients["update_kept_compensated"] = _Quotient(kept, exact**2)
        return quotients

    def _of_decay(
        self, before: _Before, runs: Sequence[_Run], old: Tensor, gradient: Tensor
    ) -> "_Quotient":
        """0 / 0 where there is none, or none that can be told from noise."""
        asked, kept = torch.zeros_like(old), torch.zeros_like(old)
        for run in runs:
            count = run.where.stop - run.where.start
            rate = run.decay_rate
            if rate == 0 or noise(self._arithmetic, rate=rate, count=count) > MOST_NOISE:
                continue
            step = Step(
                weight=before.weight[run.where],
                grad=gradient[run.where],
                states={name: state[run.where] for name, state in before.states.items()},
                num_steps=run.num_steps,
                group=run.group,
            )
            asked[run.where] = -rate * old[run.where]
            kept[run.where] = stored_difference(type(self._optimizer), step)
        return _Quotient(kept * asked, asked**2)

    def _runs(self, before: _Before) -> Iterator[_Run]:
        # Looked up each time: to load a state replaces the groups.
        group_of = {
            param: group for group in self._optimizer.param_groups for param in group["params"]
        }
        start = 0
        keys = [
            (site.kind, id(group_of[site.param]), steps)
            for site, steps in zip(before.sites, before.num_steps, strict=True)
        ]
        for (kind, _, num_steps), members in groupby(range(len(keys)), key=keys.__getitem__):
            sites = [before.sites[i] for i in members]
            end = start + sum(len(site.places) for site in sites)
            yield _Run(
                where=slice(start, end),
                kind=kind,
                group=group_of[sites[0].param],
                num_steps=num_steps,
            )
            start = end


@dataclass(frozen=True)
class _Quotient:
    """The sum of the numerators over that of the denominators, `[n]` both."""

    numerators: Tensor
    denominators: Tensor
    of_squares: bool = False  # then its root


def _exact_update(run: _Run, before: _Before, old: Tensor, gradient: Tensor) -> Tensor:
    """u of the run's elements, in float64."""
    beta1, beta2 = run.group["betas"]
    t = run.num_steps + 1
    g, x = gradient[run.where].double(), old[run.where]
    states = {name: state[run.where] for name, state in before.states.items()}
    m, v = torch.zeros_like(g), torch.zeros_like(g)
    if "exp_avg" in states:
        m, v = states["exp_avg"].double(), _variance_of(states).double()
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    root = (v / (1 - beta2**t)).sqrt()
    adam = run.group["lr"] * (m / (1 - beta1**t)) / (root + run.group["eps"])
    return -run.decay_rate * x - adam


def _of_gradients(before: _Before) -> dict[str, _Quotient]:
    gradient, is_in_use = before.gradient, before.is_in_use
    is_small = gradient.abs() < torch.finfo(gradient.dtype).smallest_normal
    return {
        "gradient_underflow": _Quotient(is_small & is_in_use, is_in_use),
        "gradient_overflow": _Quotient(~gradient.isfinite(), torch.ones_like(is_in_use)),
    }


def _measured(quotients: Mapping[str, _Quotient], sites: Sequence[Site]) -> dict[str, float]:
    """Each quotient of each kind and of `all`, as <probe>/<kind>; not those by 0."""
    lengths: dict[str, int] = {}
    for site in sites:
        lengths[site.kind] = lengths.get(site.kind, 0) + len(site.places)
    weights = {site.kind: site.weight for site in sites}
    sums = torch.stack(
        [
            part.double().sum()
            for quotient in quotients.values()
            for values in (quotient.numerators, quotient.denominators)
            for part in values.split(list(lengths.values()))
        ]
    )
    numbers = iter(sums.tolist())  # the one wait for the device
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


def _pick(sites: Sequence[Site], tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([site.pick(tensor) for site, tensor in zip(sites, tensors, strict=True)])


def _gradients(sites: Sequence[Site]) -> list[Tensor]:
    return [site.param.grad for site in sites if site.param.grad is not None]


def _variance_of(states: Mapping[str, Tensor]) -> Tensor:
    return true_variance(states["exp_avg_sq"], states.get("compensation"))


def _is_in_use(site: Site) -> Tensor:
    """Which sampled elements are in a row and in a column of the gradient that are not all 0.

    An embedding's row of a token that is not in the batch is not, nor what a dead unit leads to. Of
    a vector nothing is: there, the 0 of a dead unit's bias looks like any other.
    """
    grad = site.param.grad
    assert grad is not None
    if grad.ndim < 2:
        return torch.zeros_like(site.places, dtype=torch.bool)
    matrix = grad.flatten(1)
    rows, columns = (torch.linalg.vector_norm(matrix, torch.inf, dim=dim) != 0 for dim in (1, 0))
    width = matrix.shape[1]
    return rows[site.places // width] & columns[site.places % width]
