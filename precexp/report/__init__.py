"""From recorded runs to tables, curves and a verdict. Reads records alone: no torch, no wandb."""

from precexp.report.build import Report, all_completed, build_report
from precexp.report.terminal import print_report
from precexp.report.write import write_report

__all__ = ["Report", "all_completed", "build_report", "print_report", "write_report"]
