"""report.md: the whole report as one page that GitHub renders."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from precexp.report.beside import beside_section
from precexp.report.build import (
    Group,
    Report,
    problem,
    result,
)
from precexp.report.costs import environment_section, speed_section
from precexp.report.memory import memory_section
from precexp.report.numerics import numerics_section
from precexp.report.protocol import Place, places_of, tuning_section
from precexp.report.read import ReportedRun
from precexp.report.tables import (
    NOTHING,
    as_text,
    escape,
    fixed,
    heading,
    link_to,
    markdown_table,
    plural,
    whole,
)
from precexp.report.verdict import verdict_section

RUN_HEAD = (
    "arm",
    "seed",
    "status",
    "steps",
    "applied",
    "skipped",
    "tokens",
    "eval loss",
    "train loss",
    "perplexity",
    "init_hash",
    "data_hash",
    "run",
)


def render_markdown(report: Report, output: Path) -> str:
    """The text of report.md; links to runs are relative to `output`, where it will lie."""
    parts = (f"## {title}\n\n{body}\n" for title, body in sections(report, output).items())
    return "\n".join((f"# {title_of(report)}\n", *parts))


def title_of(report: Report) -> str:
    """What the report is about, in a line."""
    names = ", ".join(directory.resolve().name for directory in report.directories)
    return f"{names}: precision report"


def sections(report: Report, output: Path) -> dict[str, str]:
    """The sections of the report that have something to say: {title: Markdown}."""
    found = {
        "Verdict": verdict_section(report),
        "Tuning": tuning_section(report),
        "Beside the verdict": beside_section(report, output),
        "Matched check": _matched(report),
        "Loss curves": _curves(report),
        "Memory & bytes per parameter": memory_section(report),
        "Speed": speed_section(report),
        "Numerics": numerics_section(report),
        "Runs & failures": _runs(report, output),
        "Environment": environment_section(report),
    }
    bodies = {title: "\n".join(lines).strip() for title, lines in found.items()}
    return {title: body for title, body in bodies.items() if body}


def _matched(report: Report) -> Iterator[str]:
    if report.forced:
        yield from markdown_table(
            ("key", "values"),
            [(f"`{key}`", " | ".join(values)) for key, values in report.differing.items()],
        )
        yield ""
    elif len(report.groups) > 1:
        yield (
            f"These runs fall into {len(report.groups)} groups that are not compared with each "
            "other, because values differ that an arm may not change:"
        )
        yield ""
        yield from markdown_table(
            ("key", *(f"group {i + 1}" for i in range(len(report.groups)))),
            [(f"`{key}`", *values) for key, values in report.differing.items()],
        )
        yield ""
    for group in report.groups:
        yield from heading(group)
        yield from (f"- {line}" for line in _evidence(group, report))
        yield ""


def _evidence(group: Group, report: Report) -> Iterator[str]:
    evidence = group.evidence
    seeds = {run.seed for arm in group.arms for run in arm.runs if run.record is not None}
    counts = f"{plural(len(group.arms), 'arm')}, {plural(len(seeds), 'seed')}"
    if report.forced:
        yield f"{counts}, more than one `match_key`: compared because of `--force` alone."
    else:
        yield (
            f"{counts}, one `match_key`{_apart_from(report)} (`{group.match_key[:8]}`): model, "
            "data, schedule and every other value are the same."
        )
    if evidence.num_checked:
        yield (
            f"{plural(evidence.num_checked, 'run')} checked against another arm's run of the same "
            "seed: the same initial weights (`init_hash`), and the same tokens served "
            "(`data_hash_at`) up to the last evaluation that both have."
        )
    for reason in evidence.refused.values():
        yield f"**Refused**: {escape(reason)}. It is in no statistic and no curve."
    for line in evidence.unverified:
        yield f"Not verified: {escape(line)}."
    if evidence.dropout:
        yield (
            f"**Dropout is {evidence.dropout:g}**: masks cannot match across dtypes, so the arms "
            "match in distribution only."
        )
    for arm in group.arms:
        repeats = [
            run
            for run in arm.judged
            if run.status == "completed"
            and run.directory not in evidence.refused
            and run.seed is not None
            and arm.compared.get(run.seed, run) is not run
        ]
        for run in repeats:
            yield f"`{arm.label}`, seed {run.seed}, is there more than once; the first one counts."


def _apart_from(report: Report) -> str:
    return f" without {', '.join(f'`{key}`' for key in report.tuned)}" if report.tuned else ""


def _curves(report: Report) -> Iterator[str]:
    yield "![Loss by arm, and the difference to the reference](loss_curves.svg)"
    yield ""
    yield (
        "Lines are means over the completed seeds, bands reach from the least to the greatest; a "
        "run that did not complete is drawn alone, dashed, to a cross (diverged) or a ring."
    )
    if report.tuned:
        yield ""
        yield "Only comparison seeds are drawn, at what each arm chose (see [Tuning](#tuning))."


def _runs(report: Report, output: Path) -> Iterator[str]:
    names = {
        run.directory: f"`{arm.label}`" + (f" ({group.title})" if group.title else "")
        for group in report.groups
        for arm in group.arms
        for run in arm.runs
    }
    places = places_of(report)
    failures = [(run, text) for run in report.runs if (text := problem(run)) is not None]
    for run, text in failures:
        name = names.get(run.directory) or f"`{run.label or run.directory}`"
        seed = "" if run.seed is None else f", seed {run.seed}"
        if (place := places.get(run.directory)) is not None and place.setting is not None:
            seed += f", {as_text(place.setting)}"
        yield f"- **{name}{seed}**: {as_text(text)}"
    if failures:
        yield ""
    else:
        yield f"All {plural(len(report.runs), 'run')} completed."
        yield ""
    yield from markdown_table(
        (*RUN_HEAD[:1], *(("tuned", "half") if report.tuned else ()), *RUN_HEAD[1:]),
        [
            (
                names.get(run.directory) or f"`{run.label or 'unknown'}`",
                *(_place_cells(places.get(run.directory)) if report.tuned else ()),
                *_run_cells(run, output),
            )
            for run in report.runs
        ],
    )
    notices = Counter(text for run in report.runs if run.record for text in run.record.notices)
    if notices:
        yield ""
        yield "### Notices"
        yield ""
        yield from (
            f"- {as_text(text)} ({plural(count, 'run')})" for text, count in notices.items()
        )


def _place_cells(place: Place | None) -> Sequence[str]:
    """What the run tried, and on which half; whether it is one at what its arm chose."""
    if place is None:
        return NOTHING, NOTHING
    return place.setting or NOTHING, place.half + (" (chosen)" if place.is_chosen else "")


def _run_cells(run: ReportedRun, output: Path) -> Sequence[str]:
    evidence = run.record.evidence if run.record else {}
    loss = result(run, "final_eval_loss")
    return (
        NOTHING if run.seed is None else str(run.seed),
        "incomplete" if run.status == "running" else run.status,
        whole(result(run, "steps")),
        whole(result(run, "applied_steps")),
        whole(result(run, "skipped_steps")),
        whole(result(run, "tokens")),
        NOTHING if loss is None else link_to(run.directory, output, fixed(loss)),
        fixed(result(run, "final_train_loss")),
        fixed(result(run, "eval_perplexity"), 2),
        str(evidence.get("init_hash") or NOTHING)[:8],
        str(evidence.get("data_hash") or NOTHING)[:8],
        link_to(run.directory, output, "record") if run.status != "missing" else NOTHING,
    )
