"""python -m precexp.bench BENCHMARK [options] [key=value ...]; --help tells each one's options."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from precexp import set_process_defaults
from precexp.config import UserError

if TYPE_CHECKING:
    import torch

Arguments = Sequence[str]


class Parser(argparse.ArgumentParser):
    """Of one benchmark's arguments; all write their result to a file if they are told to."""

    def __init__(self, benchmark: str, *, output: str) -> None:
        super().__init__(prog=f"python -m precexp.bench {benchmark}")
        self.add_argument("--output", type=Path, help=output)

    def takes_overrides(self) -> None:
        self.add_argument("overrides", nargs="*", help="of the config, as key=value")

    def takes_rounds(self, rounds: int, steps: int | None = None) -> None:
        self.add_argument("--rounds", type=int, default=rounds, help="of all candidates")
        if steps is not None:
            self.add_argument("--steps", type=int, default=steps, help="in each round")

    def takes_device(self, default: str = "cpu") -> None:
        self.add_argument("--device", choices=["cpu", "cuda"], default=default)


def bench_runner(arguments: Arguments) -> None:
    from precexp.bench import runner
    from precexp.cli import compose

    parser = Parser("runner", output="JSON")
    parser.takes_overrides()
    parser.takes_rounds(runner.ROUNDS, runner.STEPS)
    args = parser.parse_intermixed_args(arguments)
    planned = compose([*runner.OVERRIDES, f"train.max_steps={args.steps}", *args.overrides])
    runner.bench(planned, rounds=args.rounds, output=args.output)


def bench_trainer(arguments: Arguments) -> None:
    from precexp.bench import trainer
    from precexp.cli import compose_sweep

    parser = Parser("trainer", output="JSON")
    parser.takes_overrides()
    parser.takes_rounds(trainer.ROUNDS, trainer.STEPS)
    args = parser.parse_intermixed_args(arguments)
    chosen = any(text.startswith("precision=") for text in args.overrides)
    overrides = [*trainer.OVERRIDES, f"train.max_steps={args.steps}", *args.overrides]
    if not chosen:
        overrides.append(trainer.PRECISIONS)
    planned = [run for _, run in compose_sweep(overrides, multirun=True)]
    trainer.bench(planned, rounds=args.rounds, output=args.output)


def bench_startup(arguments: Arguments) -> None:
    from precexp.bench import startup
    from precexp.cli import compose

    parser = Parser("startup", output="JSON")
    parser.takes_overrides()
    parser.takes_rounds(startup.ROUNDS)
    args = parser.parse_intermixed_args(arguments)
    overrides = [*startup.OVERRIDES, *args.overrides]
    config = compose(overrides).config
    startup.bench(config, overrides, rounds=args.rounds, output=args.output)


def bench_numerics(arguments: Arguments) -> None:
    from precexp.bench import numerics
    from precexp.cli import compose

    parser = Parser("numerics", output="JSON")
    parser.takes_overrides()
    args = parser.parse_intermixed_args(arguments)
    numerics.bench(compose([*numerics.OVERRIDES, *args.overrides]), output=args.output)


def bench_numerics_cost(arguments: Arguments) -> None:
    from precexp.bench import numerics_cost
    from precexp.cli import compose_sweep

    parser = Parser("numerics-cost", output="JSON")
    parser.takes_overrides()
    parser.takes_rounds(numerics_cost.ROUNDS, numerics_cost.STEPS)
    args = parser.parse_intermixed_args(arguments)
    overrides = [*numerics_cost.OVERRIDES, f"train.max_steps={args.steps}", *args.overrides]
    planned = [run for _, run in compose_sweep(overrides, multirun=True)]
    numerics_cost.bench(planned, rounds=args.rounds, output=args.output)


def bench_optimizer(arguments: Arguments) -> None:
    from precexp.bench import optimizer
    from precexp.cli import compose

    parser = Parser("optimizer", output="CSV")
    parser.takes_overrides()
    parser.takes_rounds(optimizer.ROUNDS)
    parser.takes_device()
    parser.add_argument("--shapes", default="opt-125m", help="of which model")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_intermixed_args(arguments)
    optimizer.bench(
        compose([f"model={args.shapes}", *args.overrides]),
        device=_device(args.device),
        rounds=args.rounds,
        threads=args.threads,
        output=args.output,
    )


def bench_memory(arguments: Arguments) -> None:
    from precexp.bench import memory

    parser = Parser("memory", output="JSON")
    parser.takes_device()
    args = parser.parse_args(arguments)
    memory.bench(device=_device(args.device), output=args.output)


def bench_published_table(arguments: Arguments) -> None:
    from precexp.bench import published_table

    args = Parser("published-table", output="JSON").parse_args(arguments)
    published_table.bench(output=args.output)


def bench_verdicts(arguments: Arguments) -> None:
    from precexp.bench import verdicts

    parser = Parser("verdicts", output="CSV")
    parser.add_argument("--sweeps", type=int, default=5000, help="of each kind")
    parser.add_argument("--tuned", action="store_true", help="of arms that choose a value each")
    args = parser.parse_args(arguments)
    bench = verdicts.bench_tuned if args.tuned else verdicts.bench
    bench(num_sweeps=args.sweeps, output=args.output)


def bench_faults(arguments: Arguments) -> None:
    from precexp.bench import faults

    parser = Parser("faults", output="CSV")
    parser.add_argument("--kills", type=int, default=200, help="of all recipes")
    parser.add_argument("--seed", type=int, default=0, help="of their moments")
    args = parser.parse_args(arguments)
    faults.bench(num_kills=args.kills, seed=args.seed, output=args.output)


def bench_rounding(arguments: Arguments) -> None:
    from precexp.bench import rounding

    parser = Parser("rounding", output="a folder")
    parser.add_argument("sweep", type=Path, help="the folder of a sweep of experiment=rounding")
    parser.add_argument("--docs", type=Path, help="a page whose tables to rewrite")
    args = parser.parse_args(arguments)
    rounding.bench(args.sweep, output=args.output, docs=args.docs)


def bench_gpu_check(arguments: Arguments) -> None:
    from precexp.bench import gpu_check
    from precexp.cli import compose, compose_sweep

    parser = Parser("gpu-check", output="a folder; default: outputs/reference/<the GPU's name>")
    parser.takes_overrides()
    parser.takes_rounds(gpu_check.ROUNDS)
    parser.takes_device("cuda")
    parser.add_argument("--shapes", help="of which model the optimizers step; default: by memory")
    args = parser.parse_intermixed_args(arguments)
    device = _device(args.device)
    overrides = [*gpu_check.OVERRIDES, f"device={args.device}", *args.overrides]
    shapes = args.shapes or gpu_check.shapes_for(device)
    on_model = [text for text in args.overrides if text.startswith("model.")]
    completed = gpu_check.bench(
        [run for _, run in compose_sweep(overrides, multirun=True)],
        compose([f"model={shapes}", *on_model]),
        device=device,
        rounds=args.rounds,
        output=args.output or gpu_check.folder_of(device),
    )
    if not completed:
        raise SystemExit(1)


BENCHMARKS: dict[str, Callable[[Arguments], None]] = {
    "runner": bench_runner,
    "trainer": bench_trainer,
    "startup": bench_startup,
    "numerics": bench_numerics,
    "numerics-cost": bench_numerics_cost,
    "optimizer": bench_optimizer,
    "memory": bench_memory,
    "published-table": bench_published_table,
    "verdicts": bench_verdicts,
    "faults": bench_faults,
    "rounding": bench_rounding,
    "gpu-check": bench_gpu_check,
}


def main(arguments: Arguments) -> int:
    set_process_defaults()
    parser = argparse.ArgumentParser(prog="python -m precexp.bench", description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    args = parser.parse_args(arguments[:1])
    try:
        BENCHMARKS[args.benchmark](arguments[1:])
    except UserError as error:
        print(f"precexp: {error}", file=sys.stderr)
        return 2
    return 0


def _device(name: str) -> "torch.device":
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU here")
    return torch.device(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
