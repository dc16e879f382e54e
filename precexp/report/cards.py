"""The verdict cards of report.html: an arm each, with its interval against the margin."""

import html
from collections.abc import Iterator

from precexp.report.build import ArmResult, Group, Report, bytes_per_param, mean_of, timing
from precexp.report.charts import Style, style_of
from precexp.report.protocol import chosen_cell, chosen_head
from precexp.report.tables import (
    NOTHING,
    fixed,
    percent,
    short,
    spell_interval,
    verdict_of,
    whole,
)

# Each verdict has a shape of its own: colour alone does not tell everybody.
ICONS = {
    "equivalent": '<circle cx="12" cy="12" r="11"/><path class="cut" d="M7 9.7h10M7 14.3h10"/>',
    "better": '<circle cx="12" cy="12" r="11"/><path class="cut" d="M12 6.5v11m-4.6-4.6 4.6 4.6 '
    '4.6-4.6"/>',
    "worse": '<path d="M12 1.2 23.4 21.6H.6Z"/><path class="cut" d="M12 8.4v6.2M12 17.8v.6"/>',
    "undecided": '<circle class="open" cx="12" cy="12" r="10"/><path class="mark" d="M8.9 9.6a3.1 '
    '3.1 0 1 1 4.6 2.7c-1 .6-1.5 1.1-1.5 2.2M12 17.4v.5"/>',
    "reference": '<path class="open" d="M12 1.8 22.2 12 12 22.2 1.8 12Z"/><circle class="dot" '
    'cx="12" cy="12" r="2.6"/>',
    "alone": '<circle class="open" cx="12" cy="12" r="10"/><path class="mark" d="M8 12h8"/>',
}
DASH_ARRAYS = {"solid": "none", "dash": "5 3", "dot": "1.5 2.5"}
MARKS = {
    "circle": '<circle cx="14" cy="6" r="4"/>',
    "square": '<path d="M10.4 2.4h7.2v7.2h-7.2Z"/>',
    "diamond": '<path d="M14 .9 19.1 6 14 11.1 8.9 6Z"/>',
    "triangle-up": '<path d="M14 1.2 18.6 9.6H9.4Z"/>',
    "triangle-down": '<path d="M14 10.8 9.4 2.4h9.2Z"/>',
    "cross": '<path d="M12.4 1.5h3.2v2.9h2.9v3.2h-2.9v2.9h-3.2V7.6H9.5V4.4h2.9Z"/>',
    "x": '<path d="m11 .9 3 3 3-3L19.1 3l-3 3 3 3-2.1 2.1-3-3-3 3L8.9 9l3-3-3-3Z"/>',
}
WIDTH, MIDDLE, HALF = 260, 130, 120  # of an interval's picture
FARTHEST = 4  # margins from zero; what lies beyond is an arrow


def cards_of(report: Report) -> str:
    """The cards of all groups; empty without any."""
    if not report.groups:
        return ""
    return f'<section class="verdicts" aria-label="Verdicts">\n{"".join(_cards(report))}</section>'


def icon(name: str) -> str:
    return f'<svg class="icon" viewBox="0 0 24 24" aria-hidden="true">{ICONS[name]}</svg>'


def swatch(style: Style) -> str:
    """How the arm's lines look in the charts."""
    dashes = DASH_ARRAYS[style.dash]
    return (
        f'<svg class="swatch" style="--arm:{style.colour};--arm-dark:{style.dark}" '
        'viewBox="0 0 28 12" aria-hidden="true"><path d="M0 6h28" stroke="currentColor" '
        f'stroke-width="2.4" stroke-dasharray="{dashes}"/>'
        f'<g fill="currentColor">{MARKS[style.symbol]}</g></svg>'
    )


def _cards(report: Report) -> Iterator[str]:
    number = 0
    for group in report.groups:
        if group.title:
            yield f"<h2>{html.escape(group.title)}</h2>\n"
        yield '<div class="cards">\n'
        reach = _reach(group)
        for arm in group.arms:
            yield "".join(_card(arm, group, report, number=number, reach=reach))
            number += 1
        yield "</div>\n"


def _card(
    arm: ArmResult, group: Group, report: Report, *, number: int, reach: float | None
) -> Iterator[str]:
    verdict = verdict_of(arm, group) or "alone"
    words = "Nothing to compare" if verdict == "alone" else verdict.capitalize()
    yield (
        f'<article class="card" data-verdict="{verdict}"><h3>'
        f"{swatch(style_of(arm.label, report.labels))}"
        f'<a href="#runs-of-{number}"><code>{html.escape(arm.label)}</code></a></h3>'
        f'<p class="word {verdict}">{icon(verdict)}{words}</p>\n'
    )
    if reach is not None and group.margin is not None:
        yield _picture(arm, group, reach=reach)
    yield from _gap(arm, group, report, verdict)
    total = mean_of(arm.runs, bytes_per_param, "total")
    speed = mean_of(arm.runs, timing, "tokens_per_second")
    seeds = str(arm.num_seeds) + (f" + {len(arm.diverged)} diverged" if arm.diverged else "")
    spread = fixed(arm.loss_mean)
    if arm.loss_std is not None:
        spread += f" ± {fixed(arm.loss_std)}"
    yield '<dl class="facts">'
    for term, value in (
        *((head, html.escape(chosen_cell(arm, report))) for head in chosen_head(report)),
        (report.words, spread),
        ("bytes/param", short(total)),
        ("tokens/s", whole(speed)),
        ("seeds", f'<a href="#runs-of-{number}">{seeds}</a>'),
    ):
        yield f"<dt>{html.escape(term)}</dt><dd>{value}</dd>"
    yield "</dl></article>\n"


def _gap(arm: ArmResult, group: Group, report: Report, verdict: str) -> Iterator[str]:
    """The difference in figures and why it is judged so; for the reference the yardstick."""
    against = arm.comparison
    if against is None:
        if verdict == "reference" and group.margin is not None:
            yield (
                f'<p class="gap"><b>± {fixed(group.margin)}</b> <span>margin, '
                f"{percent(report.margin)} of its mean</span></p>"
            )
            if group.noise is not None:
                yield (
                    f'<p class="why">Its own seeds vary by ± {fixed(group.noise)} '
                    "(standard deviation).</p>"
                )
        return
    if against.difference is not None:
        interval = ""
        if against.ci_low is not None:
            interval = f" <span>90 %: {spell_interval(against.ci_low, against.ci_high)}</span>"
        yield f'<p class="gap"><b>{fixed(against.difference, sign=True)}</b>{interval}</p>'
    yield f'<p class="why">{html.escape(against.reason[:1].upper() + against.reason[1:])}.</p>'


def _reach(group: Group) -> float | None:
    """How far from zero the pictures of a group reach, the same for all; None without a margin."""
    if group.margin is None or group.reference is None or len(group.arms) < 2:
        return None
    ends = [
        abs(end)
        for arm in group.arms
        if (found := arm.comparison) is not None
        for end in (found.difference, found.ci_low, found.ci_high)
        if end is not None
    ]
    farthest = max(2 * group.margin, group.noise or 0.0, *ends)
    return min(1.08 * farthest, FARTHEST * group.margin) or None


def _picture(arm: ArmResult, group: Group, *, reach: float) -> str:
    """The interval against the margin as a small picture."""
    assert group.margin is not None

    def at(value: float) -> float:
        return round(MIDDLE + HALF * max(-1.0, min(1.0, value / reach)), 2)

    left, right = at(-group.margin), at(group.margin)
    parts = [
        f'<rect class="margin" x="{left}" y="4" width="{round(right - left, 2)}" height="30"/>',
        f'<path class="edge" d="M{left} 4v30M{right} 4v30"/>',
        f'<path class="zero" d="M{MIDDLE} 4v30"/>',
    ]
    against = arm.comparison
    words = f"margin ± {fixed(group.margin)}"
    if against is None and group.noise:
        low, high = at(-group.noise), at(group.noise)
        parts.append(f'<path class="noise" d="M{low} 14v10M{low} 19H{high}M{high} 14v10"/>')
        words = f"the reference's seeds vary by ± {fixed(group.noise)}, {words}"
    elif against is not None and against.difference is not None:
        if against.ci_low is not None and against.ci_high is not None:
            parts += _bar(against.ci_low, against.ci_high, reach, at(against.ci_low))
            words = f"90 % interval {spell_interval(against.ci_low, against.ci_high)}, {words}"
        place = at(against.difference)
        if abs(against.difference) <= reach:
            parts.append(f'<circle class="dot" cx="{place}" cy="19" r="5.5"/>')
        words = f"difference {fixed(against.difference, sign=True)}, {words}"
    elif against is not None:
        words = f"{NOTHING}, {words}"
    parts += [
        f'<text x="{left}" y="50" text-anchor="middle">-{group.margin:.2g}</text>',
        f'<text x="{right}" y="50" text-anchor="middle">+{group.margin:.2g}</text>',
    ]
    if right - left > 90:  # room between the numbers
        parts.append(f'<text x="{MIDDLE}" y="50" text-anchor="middle">0</text>')
    return (
        f'<svg class="interval" viewBox="0 0 {WIDTH} 54" role="img" '
        f'aria-label="{html.escape(words)}">{"".join(parts)}</svg>\n'
    )


def _bar(low: float, high: float, reach: float, start: float) -> Iterator[str]:
    """The interval's bar: a cap at an end inside the picture, an arrow at one beyond it."""
    end = round(MIDDLE + HALF * max(-1.0, min(1.0, high / reach)), 2)
    if start == end and abs(low) > reach:  # all of it lies beyond: a stub says where
        start += -24 if low > 0 else 0
        end += 24 if low < 0 else 0
    yield f'<path class="bar" d="M{start} 19H{end}"/>'
    for place, value in ((start, low), (end, high)):
        if abs(low) > reach and low * high > 0 and value == min(low, high, key=abs):
            continue
        if abs(value) <= reach:
            yield f'<path class="bar" d="M{place} 13v12"/>'
        else:
            step = -7 if value > 0 else 7
            yield f'<path class="bar" d="M{place + step} 12L{place} 19L{place + step} 26"/>'
