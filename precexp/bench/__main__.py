"""python -m precexp.bench BENCHMARK [--output FILE] [options] [key=value ...]"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from precexp import set_process_defaults
from precexp.config import UserError

if TYPE_CHECKING:
    import torch


BENCHMARKS = (
    "runner",
    "trainer",
    "numerics",
    "optimizer",
    "memory",
    "published-table",
    "verdicts",
)


def main(arguments: Sequence[str]) -> int:
    set_process_defaults()
    from precexp.bench import memory, numerics, optimizer, published_table, runner, verdicts
    from precexp.cli import compose, compose_sweep

    parser = argparse.ArgumentParser(prog="python -m precexp.bench", description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("overrides", nargs="*", help="of the config, as key=value")
    parser.add_argument("--rounds", type=int, help="of all candidates (runner, trainer, optimizer)")
    parser.add_argument(
        "--steps", type=int, default=runner.STEPS, help="runner, trainer: in each round"
    )
    parser.add_argument("--sweeps", type=int, default=5000, help="verdicts: of each kind")
    parser.add_argument("--shapes", default="opt-125m", help="optimizer: of which model")
    parser.add_argument("--threads", type=int, default=1, help="optimizer")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="optimizer, memory"
    )
    parser.add_argument("--output", type=Path, help="JSON, for optimizer and verdicts CSV")
    args = parser.parse_intermixed_args(arguments)
    try:
        if args.benchmark == "numerics":
            planned = compose([*numerics.OVERRIDES, *args.overrides])
            numerics.bench(planned, output=args.output)
        elif args.benchmark == "memory":
            memory.bench(device=_device(args.device), output=args.output)
        elif args.benchmark == "published-table":
            published_table.bench(output=args.output)
        elif args.benchmark == "verdicts":
            verdicts.bench(num_sweeps=args.sweeps, output=args.output)
        elif args.benchmark == "optimizer":
            planned = compose([f"model={args.shapes}", *args.overrides])
            rounds = args.rounds or optimizer.ROUNDS
            optimizer.bench(
                planned,
                device=_device(args.device),
                rounds=rounds,
                threads=args.threads,
                output=args.output,
            )
        elif args.benchmark == "trainer":
            from precexp.bench import trainer  # imports transformers' Trainer: a second or more

            chosen = any(text.startswith("precision=") for text in args.overrides)
            overrides = [] if chosen else [trainer.PRECISIONS]
            steps = f"train.max_steps={args.steps}"
            composed = compose_sweep(
                [*trainer.OVERRIDES, steps, *overrides, *args.overrides], multirun=True
            )
            rounds = args.rounds or trainer.ROUNDS
            trainer.bench([each for _, each in composed], rounds=rounds, output=args.output)
        else:
            steps = f"train.max_steps={args.steps}"
            planned = compose([*runner.OVERRIDES, steps, *args.overrides])
            runner.bench(planned, rounds=args.rounds or runner.ROUNDS, output=args.output)
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
