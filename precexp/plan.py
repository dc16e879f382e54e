"""python -m precexp.plan [-m] [key=value ...]

Plans the memory of a training step, without a GPU and without a download; -m plans a sweep's runs
side by side. plan.output=FILE.json writes the plan, and a picture beside it; plan.device=cpu plans
for a CPU; plan.gpu_memory=24GiB says what fits.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from precexp import set_process_defaults
from precexp.cli import compose_sweep
from precexp.config import RunConfig, UserError
from precexp.memory.planner import PlanError, Planner
from precexp.record import write_json
from precexp.sweep import PlannedRun

SCHEMA = 1
MIB = 2**20
# key: its words
CATEGORIES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "saved activations",
    "autocast_copies": "autocast copies",
    "loss": "loss and logits",
    "inputs": "inputs",
    "temporaries": "temporaries",
    "buffers": "buffers and counters",
}
PHASES = {"forward": "forward peak", "backward": "backward peak", "step": "optimizer step peak"}

Plans = Mapping[str, Mapping[str, Any]]  # by title


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 1: a plan failed; 2: user error."""
    set_process_defaults()
    parser = argparse.ArgumentParser(
        prog="python -m precexp.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="plan a sweep")
    parser.add_argument("--config-dir", "-cd", help="more config groups, as of python -m precexp")
    parser.add_argument("overrides", nargs="*", help="of the config, as key=value")
    args = parser.parse_intermixed_args(arguments)
    try:
        composed = compose_sweep(args.overrides, multirun=args.multirun, config_dir=args.config_dir)
        runs = _titled(composed)
        first = next(iter(runs.values())).config
        _check_output(first.plan.output)
        plans, code = _plan_all(runs)
        if plans:
            _show(plans, first)
            _write(plans, runs, first)
    except UserError as error:
        print(f"precexp: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"precexp: {error}", file=sys.stderr)
        return 2
    return code


def _plan_all(runs: Mapping[str, PlannedRun]) -> tuple[dict[str, Mapping[str, Any]], int]:
    """The plans by title, and the exit code; what failed is told at once, and left out."""
    plans: dict[str, Mapping[str, Any]] = {}
    code = 0
    with Planner() as planner:
        for title, run in runs.items():
            try:
                plans[title] = planner.plan(run.config)
            except (UserError, PlanError) as error:
                print(f"precexp: {_where(title, runs)}{error}", file=sys.stderr)
                code = max(code, 2 if isinstance(error, UserError) else 1)
            except KeyboardInterrupt:
                done = f"{len(plans)} of {len(runs)}"
                print(f"precexp: interrupted; {done} planned", file=sys.stderr)
                return plans, max(code, 1)
    return plans, code


def _check_output(output: str | None) -> None:
    """Raises UserError for a plan.output that could not be written after all the planning."""
    if output is None:
        return
    path = Path(output)
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"plan.output: {folder} is not a folder; it must exist")
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".precexp-"):
            pass
    except OSError as error:
        raise UserError(f"plan.output: cannot write in {folder} ({error.strerror})") from None
    for each in _files(path):
        if each.is_dir():
            raise UserError(f"plan.output: {each} is a folder")


def _files(path: Path) -> tuple[Path, Path, Path]:
    """What is written: the plan and its pictures."""
    return path, path.with_suffix(".svg"), path.with_suffix(".png")


def _titled(runs: Sequence[tuple[Sequence[str], PlannedRun]]) -> dict[str, PlannedRun]:
    """The runs by what tells them apart; those that differ only in the seed once."""
    shared = set.intersection(*(set(overrides) for overrides, _ in runs))
    titled: dict[str, PlannedRun] = {}
    seen: list[RunConfig] = []
    for overrides, run in runs:
        config = dataclasses.replace(run.config, seed=0)
        if config not in seen:
            seen.append(config)
            own = [o for o in overrides if o not in shared and not o.startswith("seed=")]
            titled[" ".join(own) or run.arm.label] = run
    return titled


def _where(title: str, runs: Mapping[str, PlannedRun]) -> str:
    return f"{title}: " if len(runs) > 1 else ""


def _write(plans: Plans, runs: Mapping[str, PlannedRun], config: RunConfig) -> None:
    if config.plan.output is None:
        return
    from precexp.report.plots import write_memory_figure  # slow to import

    path = Path(config.plan.output)
    records = [
        {
            "schema": SCHEMA,
            "title": title,
            "arm": runs[title].arm.label,
            "config": dataclasses.asdict(runs[title].config),
            **values,
        }
        for title, values in plans.items()
    ]
    single = len(runs) == 1
    write_json(path, records[0] if single else {"schema": SCHEMA, "plans": records})
    write_memory_figure(
        {title: values["categories"] for title, values in plans.items()}, path.with_suffix("")
    )
    print(f"written: {', '.join(map(str, _files(path)))}")


# For people


def _show(plans: Plans, config: RunConfig) -> None:
    console = Console()
    console.print(_table(plans, config))
    for title, values in plans.items():
        if len(plans) > 1:
            console.print(f"\n[bold]{title}[/bold]", highlight=False)
        console.print("\n".join(_sentences(values)), highlight=False, markup=False, soft_wrap=True)
    if len(plans) == 1:
        (values,) = plans.values()
        console.print(_largest(values))
        console.print(_unseen(values))


def _table(plans: Plans, config: RunConfig) -> Table:
    tokens = f"{config.train.batch_size} x {config.data.block_size} tokens"
    table = Table(title=f"a training step of {config.model.name}, {tokens}: allocated MiB = 2^20 B")
    table.add_column("")
    for title in plans:
        table.add_column(title, justify="right", overflow="fold")

    def row(words: str, cells: Iterator[str], *, last: bool = False) -> None:
        table.add_row(words, *cells, end_section=last)

    every = list(plans.values())
    for key, words in CATEGORIES.items():
        last = key == "buffers"
        row(words, (_mib(values["categories"][key]) for values in every), last=last)
    peaks = (f"{_mib(v['peak_bytes'])} ({v['peak_phase']})" for v in every)
    row("[bold]peak[/bold]", peaks, last=True)
    for key, words in PHASES.items():
        row(words, (_mib(values["phases"][key]) for values in every))
    row("between steps", (_mib(values["steady_bytes"]) for values in every))
    row("peak by formula", (_mib(v["closed_form_bytes"]) for v in every), last=True)
    for key in ("weights", "gradients", "states", "total"):
        cells = (f"{values['bytes_per_param'][key]:.4g}" for values in every)
        row(f"{key}, bytes/param", cells)
    if every[0]["fit"] is not None:
        memory = config.plan.gpu_memory
        table.add_section()
        row(f"fits in {memory}", (_fits(values["fit"]) for values in every))
        row("largest train.batch_size", (_batch(values["fit"]) for values in every))
    return table


def _fits(fit: Mapping[str, Any]) -> str:
    return "yes" if fit["fits"] else "perhaps" if fit["may_fit"] else "no"


def _batch(fit: Mapping[str, Any]) -> str:
    sure, perhaps = fit["largest_batch_size"], fit["largest_batch_size_low"]
    if perhaps is None:
        return "none"
    return str(sure) if sure == perhaps else f"{sure or 0} (perhaps {perhaps})"


def _sentences(values: Mapping[str, Any]) -> Iterator[str]:
    """What dominates, and what would change it."""
    peak = values["peak_bytes"]
    largest = max(CATEGORIES, key=lambda key: values["categories"][key])
    share = values["categories"][largest] / peak
    yield (
        f"At the peak, in the {values['peak_phase']} phase, {CATEGORIES[largest]} are "
        f"{100 * share:.0f} % of {_mib(peak)} MiB."
    )
    if values["ways_out"]:
        yield "Smaller, with the same tokens per step:"
    for way in values["ways_out"]:
        yield (
            f"  {way['overrides']}: {_mib(way['peak_bytes'])} MiB "
            f"(-{100 * way['saved_bytes'] / peak:.0f} %; costs {way['cost']})"
        )


def _largest(values: Mapping[str, Any]) -> Table:
    table = Table(title="the largest at the peak")
    for column in ("MiB", "shape", "dtype", "what", "from"):
        table.add_column(column, justify="right" if column == "MiB" else "left", overflow="fold")
    for each in values["largest"]:
        shape = "x".join(map(str, each["shape"])) or "scalar"
        table.add_row(
            _mib(each["bytes"]), shape, each["dtype"], CATEGORIES[each["category"]], each["origin"]
        )
    return table


def _unseen(values: Mapping[str, Any]) -> Table:
    table = Table(title="not in the plan (from experience, not measured)")
    for column in ("", "MiB", "what"):
        table.add_column(column, overflow="fold")
    for each in values["unseen"]:
        low, high = (_mib(each[key], digits=0) for key in ("low_bytes", "high_bytes"))
        table.add_row(each["name"], f"{low} to {high}", each["note"])
    return table


def _mib(num_bytes: int | None, *, digits: int = 1) -> str:
    return "" if num_bytes is None else f"{num_bytes / MIB:,.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
