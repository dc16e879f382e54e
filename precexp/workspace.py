"""A comparison as a saved view of a wandb project, made by wandb's own wandb-workspaces.

Imported by `precexp.dashboard` alone: the package is an extra. The view shows the runs that the
report is about and no others of the project, since only those are matched.
"""

import re
from collections.abc import Mapping, Sequence

import wandb_workspaces.expr as expr
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces.reports.v2.interface import PanelTypes

from precexp.comparison import FIGURES, Comparison, Series, name_in
from precexp.config import WandbConfig
from precexp.report.build import Group, Report
from precexp.report.palette import colour_of
from precexp.report.tables import NOTHING, fixed, markdown_table, spell_interval, verdict_of

COMPARISON_COLOUR = "#999999"
BYTES = ("weights", "gradients", "states", "total")
NATS = "nats per token"
PROBES = {  # docs/numerics.md
    "moved": "share of weights that moved in the step",
    "update_kept": "share of the update that reached the weights",
    "update_kept_compensated": "share of the update that reached weights + compensation",
    "decay_kept": "share of the decay that was stored",
    "variance_ratio": "stored variance over its float32 shadow",
    "update_to_weight": "size of the update over that of the weights",
    "gradient_underflow": "share of gradients that are zero among others that are not",
    "gradient_overflow": "share of gradients that are not finite",
}


def build_workspace(comparison: Comparison, config: WandbConfig, *, entity: str) -> ws.Workspace:
    """The view, with an id of its own that the comparison's gives; nothing is sent."""
    workspace = ws.Workspace(
        entity=entity,
        project=config.project,
        name=_display_name(comparison.sweeps),
        sections=_sections(comparison),
        settings=ws.WorkspaceSettings(
            smoothing_type="none",
            max_runs=max(10, len(comparison.arm_of) + 1),
            tooltip_number_of_runs="all_runs",
        ),
        runset_settings=_runset(comparison),
    )
    # Public is only a name made up at each save, which would add a view each time.
    workspace._internal_name = f"nw-{_view_id(comparison)}-v"
    return workspace


def save_workspace(workspace: ws.Workspace, comparison: Comparison) -> str:
    """Saves the view, in place of an earlier one of the same comparison; returns its address."""
    url = workspace.url
    try:
        saved = ws.Workspace.from_url(url)
    except ValueError as error:
        if f"Workspace `{_view_id(comparison)}` not found" not in str(error):
            raise
        saved = workspace
    saved.name, saved.sections = workspace.name, workspace.sections
    saved.settings, saved.runset_settings = workspace.settings, workspace.runset_settings
    saved.save()
    return url


def write_workspace(workspace: ws.Workspace) -> str:
    """The view as JSON, as the library would send it."""
    return workspace._to_model().model_dump_json(by_alias=True, indent=2) + "\n"


def _view_id(comparison: Comparison) -> str:
    return comparison.run_id[:11]  # as long as wandb's own


def _display_name(sweeps: Sequence[str]) -> str:
    """wandb refuses symbols, such as = and +."""
    return re.sub(r"[^\w .,/-]", "-", f"precexp {', '.join(sweeps)}")


def _runset(comparison: Comparison) -> ws.RunsetSettings:
    """The runs of the report, grouped by arm, each in its arm's colour."""
    report = comparison.report
    ids = [*comparison.arm_of, comparison.run_id]
    colours = {label: colour_of(label, report.labels) for label in report.labels}
    several = len(report.groups) > 1  # those of one arm that do not match are not averaged
    paths: dict[object, object] = {"comparison": COMPARISON_COLOUR, **colours}
    if several:
        paths = {
            ws.GroupPath(run.record.match_key, arm.label): colours[arm.label]
            for group in report.groups
            for arm in group.arms
            for run in arm.judged
            if run.record is not None
        }
    by_arm = expr.Metric("JobType")
    return ws.RunsetSettings(
        filters=expr.And(expr.Metric("ID").isin(ids)),
        groupby=[expr.Config("match_key"), by_arm] if several else [by_arm],
        order=[expr.Ordering(expr.Metric("Name"), ascending=True)],
        run_settings={
            comparison.run_id: ws.RunSettings(color=COMPARISON_COLOUR),
            **{one: ws.RunSettings(color=colours[arm]) for one, arm in comparison.arm_of.items()},
        },
        group_colors=paths,
    )


def _sections(comparison: Comparison) -> list[ws.Section]:
    """What a report has, and more: the names are those that precexp.tracking logs."""
    return [
        _section(
            "Verdict",
            wr.MarkdownPanel(markdown=_verdicts(comparison.report)),
            wr.WeavePanelSummaryTable(table_name="arms"),
            wr.MediaBrowser(title="figures", media_keys=[f"figures/{name}" for name in FIGURES]),
        ),
        _section(
            "Loss",
            _lines("eval loss over tokens", ["eval_loss"], x="tokens", unit=NATS),
            _lines("eval loss over steps", ["eval_loss"], unit=NATS),
            _lines("training loss over tokens", ["loss"], x="tokens", unit=NATS),
            _lines("training loss over steps", ["loss"], unit=NATS),
        ),
        _section(
            "Difference to reference",
            *(_differences(comparison, group) for group in comparison.report.groups),
        ),
        _section(
            "Memory",
            _bars("bytes per parameter", [f"bytes_per_param.{part}" for part in BYTES]),
            _bars("measured peak of a step, bytes", ["memory.measured.peak_bytes"]),
            _bars("planned peak of a step, bytes", ["memory.planned.peak_bytes"]),
        ),
        _section(
            "Speed",
            _bars("tokens per second", ["timing.tokens_per_second"]),
            _lines("seconds of a step", ["step_seconds"], unit="seconds"),
        ),
        _section(
            "Training",
            _lines("gradient norm before clipping", ["grad_norm"]),
            _lines("learning rate", ["lr"]),
            _lines("loss scale", ["loss_scale"]),
            _lines("skipped steps: 1, or the share of the seeds", ["skipped"]),
            _bars("skipped steps", ["results.skipped_steps"]),
        ),
        _section(
            "Numerics",
            *(
                _lines(title, [], pattern=f"^numerics/{probe}/.*")
                for probe, title in PROBES.items()
            ),
            _lines("skipped steps since the last probe", ["numerics/loss_scale_backoffs"]),
        ),
    ]


def _section(name: str, *panels: PanelTypes) -> ws.Section:
    return ws.Section(
        name=name,
        panels=list(panels),
        is_open=True,
        layout_settings=ws.SectionLayoutSettings(columns=2, rows=2),
    )


def _lines(
    title: str,
    keys: Sequence[str],
    *,
    x: str = "step",
    unit: str | None = None,
    pattern: str | None = None,
    colours: Mapping[str, str] | None = None,
    titles: Mapping[str, str] | None = None,
) -> wr.LinePlot:
    """Over the seeds of an arm: the mean, and the range around it."""
    return wr.LinePlot(
        title=title,
        x=x,
        y=list(keys),
        title_y=unit,
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        smoothing_type="none",
        point_visualization_method="bucketing-gorilla",  # keeps extremes
        metric_regex=pattern,
        line_colors=dict(colours) if colours else None,
        line_titles=dict(titles) if titles else None,
    )


def _bars(title: str, keys: Sequence[str]) -> wr.BarPlot:
    return wr.BarPlot(title=title, metrics=list(keys), groupby_aggfunc="mean")


def _differences(comparison: Comparison, group: Group) -> wr.LinePlot:
    series = [one for one in comparison.series if one.group is group]
    margin = "" if group.margin is None else f", margin ±{group.margin:.4g}"
    title = f"eval loss minus that of {group.reference}{margin}"
    return _lines(
        title if series else f"{title}: nothing to compare",
        [one.key for one in series],
        unit=NATS,
        colours={
            _line(comparison, one): colour_of(one.label, comparison.report.labels) for one in series
        },
        titles={_line(comparison, one): name_in(group, one.label) for one in series},
    )


def _line(comparison: Comparison, series: Series) -> str:
    return f"{comparison.run_id}:{series.key}"


def _verdicts(report: Report) -> str:
    rows = []
    for group in report.groups:
        for arm in group.arms:
            against = arm.comparison
            rows.append(
                (
                    name_in(group, arm.label),
                    verdict_of(arm, group) or NOTHING,
                    fixed(against.difference if against else None, sign=True),
                    spell_interval(against.ci_low, against.ci_high) if against else NOTHING,
                    str(arm.num_seeds),
                )
            )
    head = ("arm", "verdict", "difference, nats per token", "90 % interval", "seeds")
    return "\n".join(markdown_table(head, rows))
