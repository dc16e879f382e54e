"""Writes the files of a report."""

from pathlib import Path

from precexp.report.build import Report
from precexp.report.csvs import write_csvs
from precexp.report.markdown import render_markdown


def write_report(report: Report, output: Path | None = None) -> None:
    """report.md, runs.csv, arms.csv and the loss curves; by default in `report.output`.

    The same records give the same bytes. Raises OSError if the directory cannot be written.
    """
    from precexp.report.plots import write_loss_curves  # matplotlib is slow to import

    output = output or report.output
    output.mkdir(parents=True, exist_ok=True)
    write_csvs(report, output)
    write_loss_curves(report, output)
    (output / "report.md").write_text(render_markdown(report, output), encoding="utf-8")
