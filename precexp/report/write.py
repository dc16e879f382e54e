"""Writes the files of a report."""

from pathlib import Path

from precexp.report.build import Report
from precexp.report.csvs import write_csvs
from precexp.report.html import render_html
from precexp.report.latex import render_latex
from precexp.report.markdown import render_markdown
from precexp.report.memory import peak_categories
from precexp.report.multiples import multiples_file
from precexp.report.probes import probed_arms
from precexp.report.protocol import has_chart, picture_of
from precexp.report.tuning_charts import tuning_file


def write_report(report: Report, output: Path | None = None) -> None:
    """report.html, report.md, the tables and the figures; by default in `report.output`.

    The same records give the same bytes. Raises OSError if the directory cannot be written.
    """
    from precexp.report.plots import write_loss_curves, write_memory_figure  # slow to import

    output = output or report.output
    output.mkdir(parents=True, exist_ok=True)
    write_csvs(report, output)
    write_loss_curves(report, output)
    if categories := peak_categories(report):
        write_memory_figure(categories, output / "memory")
    for stale in (*output.glob("numerics-*.svg"), *output.glob("tuning-*.svg")):
        stale.unlink()
    for number, group in enumerate(report.groups, 1):
        if has_chart(group):
            chart = tuning_file(group, report)
            (output / picture_of(number)).write_text(chart, encoding="utf-8")
    for found in probed_arms(report):
        (output / found.picture).write_text(multiples_file(found), encoding="utf-8")
    (output / "arms.tex").write_text(render_latex(report), encoding="utf-8")
    (output / "report.md").write_text(render_markdown(report, output), encoding="utf-8")
    (output / "report.html").write_text(render_html(report, output), encoding="utf-8")
