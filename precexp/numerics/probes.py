"""Probes: what of an update reaches the stored numbers, measured on a fixed sample.

What they measure is defined in precexp.numerics.quotients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from precexp.config import OptimConfig
from precexp.numerics.arithmetic import Arithmetic, arithmetic_of, true_weight
from precexp.numerics.decay import MOST_NOISE, Step, noise, stored_difference
from precexp.numerics.quotients import (
    Quotient,
    exact_update,
    measured,
    of_gradients,
    variance_of,
)
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
    of_gradients: Mapping[str, Quotient]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Sites after one another that take their step by the same numbers, and where they are."""

    sites: Sequence[Site]
    where: slice
    group: Mapping  # the optimizer's options
    num_steps: int  # applied so far


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
        self._shadow = torch.zeros(sites[-1].where.stop, device=sites[0].places.device)
        self._backoffs = 0
        self._before: _Before | None = None

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        if step % self._every != 0 and step != self._total_steps:
            return
        sites = self._sites_with_gradients()
        self._before = _Before(
            sites=sites,
            weight=_pick(sites, [site.param for site in sites]),
            states=self._states_of(sites),
            num_steps=[int(self._state_of(site).get("step", 0)) for site in sites],
            of_gradients=of_gradients(_pick_gradients(sites), sites),
        )

    @torch.no_grad()
    def after_update(self, step: int, *, skipped: bool) -> Mapping[str, float] | None:
        sites = self._sites_with_gradients()
        before, self._before = self._before, None
        if skipped:
            self._backoffs += 1
            quotients = {}
        else:
            gradient = _pick_gradients(sites)
            self._follow_variance(gradient.float(), sites)
            quotients = {} if before is None else self._of_update(before, gradient)
        if before is None:
            return None
        found = measured({**before.of_gradients, **quotients}, sites)
        if self._loss_scaling:
            found["loss_scale_backoffs"] = float(self._backoffs)
        self._backoffs = 0
        return found

    def state(self) -> Mapping[str, Tensor]:
        return {
            "places": self._places(),
            "shadow": self._shadow,
            "backoffs": torch.tensor(self._backoffs),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        if "places" in state and torch.equal(state["places"], self._places().cpu()):
            self._shadow.copy_(state["shadow"])
            self._backoffs = int(state["backoffs"])
            return
        sites = [site for site in self._sites if self._state_of(site)]
        for site in sites:
            self._shadow[site.where] = variance_of(self._states_of([site]))

    def _places(self) -> Tensor:
        return torch.cat([site.places for site in self._sites])

    def _sites_with_gradients(self) -> Sequence[Site]:
        return [site for site in self._sites if site.param.grad is not None]

    def _state_of(self, site: Site) -> Mapping[str, Tensor]:
        # Not by [], which would give a parameter a place in the order of the states.
        return self._optimizer.state.get(site.param, {})

    def _states_of(self, sites: Sequence[Site], names: Sequence[str] = STATES) -> dict[str, Tensor]:
        """The stored states of the sites' samples; 0 of a parameter that has taken no step yet."""
        states = [self._state_of(site) for site in sites]
        found = {}
        for name in names:
            dtype = next((state[name].dtype for state in states if name in state), None)
            if dtype is not None:
                found[name] = torch.cat(
                    [
                        site.pick(state[name])
                        if name in state
                        else torch.zeros_like(site.places, dtype=dtype)
                        for site, state in zip(sites, states, strict=True)
                    ]
                )
        return found

    def _follow_variance(self, gradient: Tensor, sites: Sequence[Site]) -> None:
        """The shadow's step, by the gradients that the optimizer has just used."""
        whole = len(sites) == len(self._sites)
        shadow = self._shadow if whole else torch.cat([self._shadow[s.where] for s in sites])
        shadow.mul_(self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
        if not whole:
            parts = shadow.split([site.count for site in sites])
            for site, part in zip(sites, parts, strict=True):
                self._shadow[site.where] = part

    def _of_update(self, before: _Before, gradient: Tensor) -> dict[str, Quotient]:
        """What became of the exact update."""
        runs = self._runs(before)
        old = true_weight(before.weight, before.states.get("compensation"))
        exact = torch.cat(
            [
                exact_update(
                    _part(before.states, run.where),
                    old[run.where],
                    gradient[run.where],
                    group=run.group,
                    num_steps=run.num_steps,
                )
                for run in runs
            ]
        )
        weight = _pick(before.sites, [site.param for site in before.sites])
        both_nan = weight.isnan() & before.weight.isnan()
        moved = (weight != before.weight) & ~both_nan
        stored = weight.double() - before.weight.double()
        after = self._states_of(before.sites, ("exp_avg_sq", "compensation"))
        shadow = torch.cat([self._shadow[site.where] for site in before.sites])
        quotients = {
            "moved": Quotient(moved, torch.ones_like(moved)),
            "update_kept": Quotient(stored * exact, exact**2),
            "update_to_weight": Quotient(exact**2, old**2, of_squares=True),
            "decay_kept": self._of_decay(before, runs, old, gradient),
            "variance_ratio": Quotient(variance_of(after), shadow),
        }
        if "compensation" in after:
            kept = (true_weight(weight, after["compensation"]) - old) * exact
            quotients["update_kept_compensated"] = Quotient(kept, exact**2)
        return quotients

    def _of_decay(
        self, before: _Before, runs: Sequence[_Run], old: Tensor, gradient: Tensor
    ) -> Quotient:
        """0 / 0 where there is no decay, and of kinds where it cannot be told from noise."""
        asked, kept = torch.zeros_like(old), torch.zeros_like(old)
        for run in runs:
            rate = run.group["lr"] * run.group["weight_decay"]
            told = self._kinds_that_tell(run, rate)
            if not told:
                continue
            step = Step(
                weight=before.weight[run.where],
                grad=gradient[run.where],
                states=_part(before.states, run.where),
                num_steps=run.num_steps,
                group=run.group,
            )
            difference = stored_difference(type(self._optimizer), step)
            lengths = [site.count for site in run.sites]
            stops = accumulate(lengths, initial=run.where.start)
            parts = zip(run.sites, stops, difference.split(lengths), strict=False)
            for site, start, part in parts:
                if site.kind in told:
                    here = slice(start, start + len(part))
                    asked[here] = -rate * old[here]
                    kept[here] = part
        return Quotient(kept * asked, asked**2)

    def _kinds_that_tell(self, run: _Run, rate: float) -> set[str]:
        """Those whose elements are enough to measure so small a decay."""
        counts: dict[str, int] = {}
        for site in run.sites:
            counts[site.kind] = counts.get(site.kind, 0) + site.count
        return {
            kind
            for kind, count in counts.items()
            if rate > 0 and noise(self._arithmetic, rate=rate, count=count) <= MOST_NOISE
        }

    def _runs(self, before: _Before) -> list[_Run]:
        # Looked up each time: to load a state replaces the groups.
        group_of = {
            param: group for group in self._optimizer.param_groups for param in group["params"]
        }
        keys = [
            (id(group_of[site.param]), num_steps)
            for site, num_steps in zip(before.sites, before.num_steps, strict=True)
        ]
        runs: list[_Run] = []
        start = 0
        for (_, num_steps), members in groupby(range(len(keys)), key=keys.__getitem__):
            sites = [before.sites[i] for i in members]
            where = slice(start, start + sum(site.count for site in sites))
            group = group_of[sites[0].param]
            runs.append(_Run(sites=sites, where=where, group=group, num_steps=num_steps))
            start = where.stop
        return runs


def _pick(sites: Sequence[Site], tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([site.pick(tensor) for site, tensor in zip(sites, tensors, strict=True)])


def _pick_gradients(sites: Sequence[Site]) -> Tensor:
    """Of sites that have one."""
    return torch.cat([site.pick(grad) for site in sites if (grad := site.param.grad) is not None])


def _part(states: Mapping[str, Tensor], where: slice) -> dict[str, Tensor]:
    return {name: state[where] for name, state in states.items()}
