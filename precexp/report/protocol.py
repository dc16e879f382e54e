"""How the tuned arms came to their settings, in words and as tables: section, notes and cells."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from precexp.report.build import ArmResult, Group, Report
from precexp.report.match import spelled
from precexp.report.tables import NOTHING, escape, fixed, heading, markdown_table, plural
from precexp.report.tuning import Halves, Trial, Tuning, edges, in_order, setting_of, spell_setting

PROTOCOL = (
    "Each arm chose among what it tried by the mean of {words} over the selection seeds, the lower "
    "half of all seeds, and is compared at its choice on the comparison seeds alone, which had no "
    "say in it: no arm loses for want of tuning, and none wins by the luck of its choice. Of equal "
    "means the smaller value is chosen; one that diverged or failed on a selection seed comes "
    "after all that did not. Arms that did not try the same values, or whose selection runs have "
    "not all ended, get no verdict."
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run stands in the protocol."""

    half: str  # selection or comparison
    setting: str | None  # None: nothing was recorded to tell it
    is_chosen: bool  # whether its setting is the one that its arm is compared at


def tuning_section(report: Report) -> Iterator[str]:
    """What was tried, what it came to and what each arm chose; nothing where nothing is tuned."""
    for number, group in enumerate(report.groups, 1):
        if group.halves is None:
            continue
        yield from heading(group)
        yield f"- {_budget(group.halves)}"
        yield from (f"- {escape(note)}" for note in tuning_notes(group, report))
        yield ""
        yield from markdown_table(
            ("arm", "budget", "chosen", "selection loss", "runner-up", "its loss"),
            [_choice_row(arm, report) for arm in group.arms],
        )
        yield ""
        yield from _grid_table(group, report)
        yield ""
        if has_chart(group):
            yield f"![Loss at what each arm tried]({picture_of(number)})"
            yield ""
    if report.tuned:
        yield PROTOCOL.format(words=report.words)


def tuning_lines(group: Group, report: Report) -> Iterator[str]:
    """The same for a terminal: the budget, each arm's choice and what is to be said of it."""
    if group.halves is None:
        return
    yield f"Tuned: {', '.join(report.tuned)}. {_budget(group.halves)}"
    for arm in group.arms:
        label, budget, chosen, loss, runner_up, its_loss = _choice_row(arm, report)
        after = "" if runner_up == NOTHING else f"; next {runner_up}, {its_loss}"
        yield f"{label}: {budget}; best {chosen}, {loss}{after}".replace("`", "")
    yield from (note.replace("`", "").replace("**", "") for note in tuning_notes(group, report))


def tuning_notes(group: Group, report: Report) -> list[str]:
    """What makes a choice doubtful, a sentence each."""
    notes = []
    settings = [arm.tuning.settings for arm in group.arms if arm.tuning is not None]
    if any(each != settings[0] for each in settings):
        notes.append(
            "**The arms did not try the same values**: unequal budgets are no fair comparison, so "
            "an arm whose values are not the reference's gets no verdict."
        )
    for arm in group.arms:
        if arm.tuning is not None:
            notes += _arm_notes(arm, arm.tuning, report)
    return notes


def chosen_cell(arm: ArmResult, report: Report) -> str:
    """The chosen values, with their keys where there are several; a dash where none was chosen."""
    if arm.tuning is None or arm.tuning.chosen is None:
        return NOTHING
    return setting_cell(arm.tuning.chosen, report)


def chosen_head(report: Report) -> tuple[str, ...]:
    """The heading of a column of `chosen_cell`; empty where nothing is tuned."""
    if not report.tuned:
        return ()
    return (report.tuned[0] if len(report.tuned) == 1 else "tuned",)


def setting_cell(trial: Trial, report: Report) -> str:
    """`0.001`, or `train.lr=0.001, train.beta2=0.95`."""
    if len(report.tuned) == 1:
        return spelled(trial.setting[0])
    return spell_setting(trial.setting, report.tuned)


def places_of(report: Report) -> Mapping[Path, Place]:
    """By its directory, where each run of a tuned group stands."""
    found = {}
    for group in report.groups:
        for arm in group.arms:
            for run in arm.runs:
                if group.halves is None or run.seed is None:
                    continue
                setting, tuning = setting_of(run, report.tuned), arm.tuning
                chosen = tuning.chosen.setting if tuning and tuning.chosen else None
                found[run.directory] = Place(
                    half="selection" if run.seed in group.halves.selection else "comparison",
                    setting=None if setting is None else spell_setting(setting, report.tuned),
                    is_chosen=setting is not None and setting == chosen,
                )
    return found


def has_chart(group: Group) -> bool:
    """Whether anything that was tried has a loss to draw."""
    return any(trial.losses for arm in group.arms if arm.tuning for trial in arm.tuning.trials)


def picture_of(number: int) -> str:
    """The file of the charts of the number-th group."""
    return f"tuning-{number}.svg"


def _budget(halves: Halves) -> str:
    selection, comparison = (
        f"{plural(len(seeds), 'seed')} ({', '.join(map(str, seeds))})" if seeds else "no seed"
        for seeds in (halves.selection, halves.comparison)
    )
    return f"Selected on {selection}; compared on {comparison}."


def _arm_notes(arm: ArmResult, tuning: Tuning, report: Report) -> Iterator[str]:
    name = f"`{arm.label}`"
    for trial in tuning.trials:
        if trial.lost:
            seeds = f"{'seed' if len(trial.lost) == 1 else 'seeds'} {_seeds(trial.lost)}"
            yield (
                f"{name} diverged or failed on selection {seeds} at "
                f"{spell_setting(trial.setting, report.tuned)}, which comes after all that did not."
            )
    if tuning.num_open:
        count = plural(tuning.num_open, "selection run")
        yield f"{name}: {count} not finished or not usable; what it chose may change."
    if tuning.chosen is not None and tuning.chosen.lost:
        yield f"{name} came through the selection seeds at none of its values."
    if len(tuning.trials) == 1:
        yield f"{name} tried one value alone, so nothing was tuned."
    if tuning.chosen is not None and not tuning.chosen.open:
        values = dict(zip(report.tuned, tuning.chosen.setting, strict=True))
        for key, end in edges(tuning, report.tuned).items():
            yield (
                f"The best `{key}` of {name}, {spelled(values[key])}, is the grid's {end}: extend "
                "the grid."
            )


def _choice_row(arm: ArmResult, report: Report) -> Sequence[str]:
    tuning = arm.tuning
    assert tuning is not None
    others = [trial for trial in tuning.trials if trial is not tuning.chosen]
    runner_up = min(others, key=lambda trial: trial.rank, default=None)
    num_ended = sum(len(trial.losses) + len(trial.lost) for trial in tuning.trials)
    num_seeds = max((len(t.losses) + len(t.lost) + len(t.open) for t in tuning.trials), default=0)
    budget = f"{plural(len(tuning.trials), 'value')} × {plural(num_seeds, 'seed')}"
    if tuning.num_open:
        budget += f", {num_ended} ended"
    return (
        f"`{arm.label}`",
        budget,
        chosen_cell(arm, report),
        fixed(tuning.chosen.mean if tuning.chosen else None),
        setting_cell(runner_up, report) if runner_up else NOTHING,
        fixed(runner_up.mean if runner_up else None),
    )


def _grid_table(group: Group, report: Report) -> Iterator[str]:
    """The mean on the selection seeds of each value and arm; what was chosen in bold."""
    tunings = [arm.tuning for arm in group.arms if arm.tuning is not None]
    rows = {trial.setting: trial for tuning in tunings for trial in tuning.trials}
    yield from markdown_table(
        (f"selection: {report.words}", *(f"`{arm.label}`" for arm in group.arms)),
        [
            (
                setting_cell(row, report),
                *(_grid_cell(tuning, row) for tuning in tunings),
            )
            for row in in_order(rows.values())
        ],
    )


def _grid_cell(tuning: Tuning, row: Trial) -> str:
    trial = next((each for each in tuning.trials if each.setting == row.setting), None)
    if trial is None:
        return "not tried"
    text = fixed(trial.mean)
    if trial is tuning.chosen:
        text = f"**{text}**"
    lost = f" ({len(trial.lost)} diverged or failed)" if trial.lost else ""
    return text + lost + (f" ({len(trial.open)} open)" if trial.open else "")


def _seeds(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
