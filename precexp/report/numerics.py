"""What precision lost: the warnings of the runs, and what their probes come to, in sentences.

Every sentence follows from numbers by a rule; the thresholds stand in `probes`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from precexp.report.build import Report, named_arms
from precexp.report.probes import (
    HALF_ULPS,
    KINDS,
    LATE,
    LEAST_DECAY,
    LEAST_UPDATE,
    LEAST_VARIANCE,
    MOST_DECAY,
    MOST_UNDERFLOW,
    MOST_VARIANCE,
    ArmProbes,
    probed_arms,
)
from precexp.report.tables import (
    NOTHING,
    as_text,
    heading,
    markdown_table,
    percent,
    plural,
    short,
)

LEVELS = (  # of the table: words, probe, kind, whether it is a share
    ("weights moved", "moved", "all", True),
    ("norm moved", "moved", "norm", True),
    ("update kept", "update_kept", "all", True),
    ("with compensation", "update_kept_compensated", "all", True),
    ("decay kept", "decay_kept", "all", True),
    ("variance / shadow", "variance_ratio", "all", False),
    ("update / weight", "update_to_weight", "all", False),
)
RULES = (
    "Numbers are means over the seeds, and medians over the probed steps (of the variance: over "
    f"the last {percent(LATE)} of them; of the decay: weighted by lr). Flagged is an arm that "
    f"keeps less than {percent(LEAST_DECAY)} or more than {percent(MOST_DECAY)} of its decay, "
    f"whose variance is below {LEAST_VARIANCE:g} or above {MOST_VARIANCE:g} times its fp32 shadow, "
    f"that keeps less than {percent(LEAST_UPDATE)} of an update (with the compensation, where "
    "there is one), in any kind of parameters, or that loses more than "
    f"{percent(MOST_UNDERFLOW)} of its gradients to underflow. Of decay and updates, the "
    "median has to be beyond the threshold by twice its standard error, from the noise between "
    "probed steps."
)
_MORE_DECAY = "use a larger lr or weight_decay"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that an arm lost; `code` as of a warning about the same."""

    code: str
    claim: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.claim}; {self.remedy}."


def numerics_section(report: Report) -> Iterator[str]:
    """Warnings and probes; nothing where there is neither."""
    yield from _warnings(report)
    arms = probed_arms(report)
    if not arms:
        return
    for group in report.groups:
        probed = [found for found in arms if found.group is group]
        if not probed:
            continue
        yield from heading(group)
        yield from markdown_table(
            ("arm", *(words for words, *_ in LEVELS)), [_row(found) for found in probed]
        )
        yield ""
        for found in probed:
            yield f"**{found.name}**"
            yield ""
            yield from (f"- {as_text(sentence)}" for sentence in sentences(found))
            yield ""
            yield f"![The probes of {as_text(found.arm.label)}]({found.picture})"
            yield ""
    yield RULES


def numerics_lines(report: Report) -> Iterator[str]:
    """What was lost, a line each, for a terminal; the remedies stand in the report."""
    arms = probed_arms(report)
    told = {found.name: findings(found) for found in arms}
    lines: dict[str, list[str]] = {}  # by what was lost: the arms
    for name, warnings in _grouped(report).items():
        found = told.get(name, [])
        claims = [finding.claim for finding in found]
        codes = {finding.code for finding in found}
        claims += [
            message.partition("; remedy:")[0] for code, message in warnings if code not in codes
        ]
        for claim in claims:
            lines.setdefault(claim, []).append(name.replace("`", ""))
    yield from (f"{_listed(names)}: {claim}." for claim, names in lines.items())
    if arms and not any(told.values()):
        yield f"Numerics: the probes of {plural(len(arms), 'arm')} saw nothing lost."


def sentences(found: ArmProbes) -> list[str]:
    """What the probes of an arm say: what it lost, or one sentence that it lost nothing."""
    return [finding.sentence for finding in findings(found)] or [_calm(found)]


def findings(found: ArmProbes) -> list[Finding]:
    """What the arm lost, by the rules."""
    rules = (_decay(found), _variance(found), _updates(found), _underflow(found))
    return [finding for finding in rules if finding is not None]


def _decay(found: ArmProbes) -> Finding | None:
    kept = found.level("decay_kept")
    if kept is None:
        return None
    spare = found.spare("decay_kept")
    if LEAST_DECAY - spare <= kept <= MOST_DECAY + spare:
        return None
    rate = found.setting("lr") * found.setting("weight_decay")
    if kept > MOST_DECAY:
        return Finding(
            code="decay_rounded_up",
            claim=f"The decay came to {short(kept)} times what was asked",
            remedy=_decay_remedy(found),
        )
    power = HALF_ULPS.get(str(found.value("precision", "param_dtype")), HALF_ULPS["bfloat16"])
    side = "below" if rate < 2.0**power else "not below"
    return Finding(
        code="decay_lost",
        claim=(
            f"{percent(max(kept, 0.0))} of the decay reached the weights{_since(found)}: "
            f"lr x weight_decay = {rate:.2g} at most, {side} 2^{power} = {2.0**power:.2g}"
        ),
        remedy=_decay_remedy(found),
    )


def _decay_remedy(found: ArmProbes) -> str:
    if found.value("precision", "param_dtype") == "float32":
        return _MORE_DECAY
    if not found.value("optim", "use_kahan_summation"):
        return "use Kahan summation (precision=bf16_pure with optim=anyprecision)"
    outside = found.value("optim", "decay") == "outside"
    if outside or found.value("optim", "mode") == "published":
        return "use decay inside the compensation (optim=anyprecision with optim.decay=inside)"
    if found.value("optim", "stochastic_rounding") is False:
        return "round the compensation stochastically (optim.stochastic_rounding=auto)"
    return _MORE_DECAY


def _since(found: ArmProbes) -> str:
    """From which probed step on the decay stayed lost; nothing where it came back at the end."""
    band = found.bands["decay_kept", "all"]
    places = (band.mean >= LEAST_DECAY).nonzero()[0]
    if not len(places):
        return f" from step {band.step[0]} on, the first that was probed"
    if places[-1] == len(band.step) - 1:
        return ""
    return f" from step {band.step[places[-1] + 1]} on"


def _variance(found: ArmProbes) -> Finding | None:
    ratios = {kind: found.late("variance_ratio", kind) for kind in KINDS}
    off = {
        kind: ratio
        for kind, ratio in ratios.items()
        if ratio is not None and not LEAST_VARIANCE <= ratio <= MOST_VARIANCE
    }
    if not off:
        return None
    worst = max(off, key=lambda kind: max(off[kind], 1 / off[kind]) if off[kind] > 0 else math.inf)
    kind = "all" if "all" in off else worst
    ratio = off[kind]
    whose = "stored variance" if kind == "all" else f"stored variance of {_words(kind)}"
    others = f" ({worst}: {short(off[worst])})" if off[worst] != ratio else ""
    effect = f", so that an update is {short(ratio**-0.5)} of what it should be"
    dtype = found.value("optim", "variance_dtype") or found.value("precision", "param_dtype")
    return Finding(
        code="variance_stalls",
        claim=(
            f"The {whose} is {short(ratio)} times its fp32 shadow at the end{others}"
            f"{effect if ratio > 0 else ''}: beta2 = {found.setting('beta2'):g} in {dtype}"
        ),
        remedy=(
            "use optim.stochastic_rounding=auto, optim.variance_dtype=float32, "
            "optim=anyprecision_packed or beta2 of at most 0.98"
        ),
    )


def _updates(found: ArmProbes) -> Finding | None:
    """Of updates that nothing carries on: neither a compensation nor a rounding that is random."""
    if found.value("optim", "weight_rounding") == "stochastic":
        return None  # kept on average, and in a single step up to a noise of many times 1
    compensated = ("update_kept_compensated", "all") in found.bands
    probe = "update_kept_compensated" if compensated else "update_kept"
    lost = {kind: share for kind in KINDS if (share := _lost_share(found, probe, kind)) is not None}
    if not lost:
        return None
    # The norm weights by themselves: near 1.0 they are the first to freeze.
    told = [kind for kind in ("all", "norm") if kind in lost]
    told = told or [min(lost, key=lambda kind: lost[kind])]
    shares = [f"{percent(max(lost[kind], 0.0))} of the updates of {_words(kind)}" for kind in told]
    still = [
        f"{percent(1 - moved)} of {_words(kind)} did not move in a step"
        for kind in told
        if (moved := found.level("moved", kind)) is not None
    ]
    remedy = (
        "raise lr" if compensated else "use Kahan summation (precision=bf16_pure) or a larger lr"
    )
    what = "was kept, with the compensation" if compensated else "reached them"
    claim = f"Only {_listed(shares)} {what}" + "".join(f"; {each}" for each in still)
    return Finding(code="updates_lost", claim=claim, remedy=remedy)


def _lost_share(found: ArmProbes, probe: str, kind: str) -> float | None:
    """What is kept of the updates, over all steps or at the end; None if that is enough."""
    level, late = found.level(probe, kind), found.late(probe, kind)
    if level is None or late is None:
        return None
    spared = (
        (level, found.spare(probe, kind)),
        (late, found.spare(probe, kind, late=True)),
    )
    return min((kept for kept, spare in spared if kept + spare < LEAST_UPDATE), default=None)


def _underflow(found: ArmProbes) -> Finding | None:
    share = found.level("gradient_underflow")
    if share is None or share <= MOST_UNDERFLOW:
        return None
    return Finding(
        code="gradients_underflow",
        claim=f"{percent(share)} of the gradients underflowed to zero",
        remedy="use a larger loss scale (precision.initial_scale) or bf16",
    )


def _calm(found: ArmProbes) -> str:
    """One sentence on an arm that lost nothing."""
    parts = []
    moved, norm = found.level("moved"), found.level("moved", "norm")
    if moved is not None:
        of_norm = "" if norm is None else f" ({percent(norm)} of the norm weights)"
        parts.append(f"{percent(moved)} of the weights moved in a step{of_norm}")
    for probe, words in (
        ("update_kept_compensated", "of the update was kept with the compensation"),
        ("update_kept", "of the update was kept"),
    ):
        if (kept := found.level(probe)) is not None:
            parts.append(f"{percent(kept)} {words}")
            break
    if (decay := found.level("decay_kept")) is not None:
        parts.append(f"{percent(decay)} of the decay")
    if (ratio := found.late("variance_ratio")) is not None:
        parts.append(f"the variance ended at {short(ratio)} times its fp32 shadow")
    if backoffs := found.total("loss_scale_backoffs"):
        parts.append(f"the loss scale was lowered {short(backoffs)} times")
    return f"Nothing lost that the probes see: {_listed(parts)}." if parts else "Nothing lost."


def _row(found: ArmProbes) -> Sequence[str]:
    cells = []
    for _, probe, kind, is_share in LEVELS:
        value = found.late(probe) if probe == "variance_ratio" else found.level(probe, kind)
        cells.append(NOTHING if value is None else percent(value) if is_share else short(value))
    return (found.name, *cells)


def _warnings(report: Report) -> Iterator[str]:
    """A row for each arm and thing that its runs were warned of; nothing if there is none."""
    rows = [
        (
            name,
            f"`{code}`",
            str(len(found)),
            *(_spelled(found[0].get(key)) for key in ("message", "value", "threshold", "remedy")),
        )
        for name, warnings in _grouped(report).items()
        for (code, _), found in warnings.items()
    ]
    if rows:
        yield from markdown_table(
            ("arm", "code", "runs", "message", "value", "threshold", "remedy"), rows
        )
        yield ""


Warnings = Mapping[tuple[str, str], Sequence[Mapping[str, object]]]  # by code and message


def _grouped(report: Report) -> dict[str, Warnings]:
    """The warnings by the arm's name; the same one of several seeds together."""
    grouped: dict[str, Warnings] = {}
    for name, runs in named_arms(report):
        found: dict[tuple[str, str], list[Mapping[str, object]]] = {}
        for run in runs:
            for warning in run.record.warnings if run.record else []:
                key = (str(warning.get("code")), str(warning.get("message")))
                found.setdefault(key, []).append(warning)
        grouped[name] = found
    return grouped


def _words(kind: str) -> str:
    return "the weights" if kind == "all" else f"the {kind} weights"


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _spelled(value: object) -> str:
    if value is None:
        return NOTHING
    return f"{value:.4g}" if isinstance(value, float) else as_text(str(value))
