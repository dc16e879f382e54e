"""python -m precexp.bench runner [--rounds N] [--steps N] [--output FILE] [key=value ...]"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
    from precexp.bench import runner
    from precexp.cli import compose
    from precexp.config import UserError

    parser = argparse.ArgumentParser(prog="python -m precexp.bench", description=__doc__)
    parser.add_argument("benchmark", choices=["runner"])
    parser.add_argument("overrides", nargs="*", help="of the config, as key=value")
    parser.add_argument("--rounds", type=int, default=runner.ROUNDS)
    parser.add_argument("--steps", type=int, default=runner.STEPS, help="in each round")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    args = parser.parse_intermixed_args(arguments)
    try:
        planned = compose([*runner.OVERRIDES, f"train.max_steps={args.steps}", *args.overrides])
        runner.bench(planned, rounds=args.rounds, output=args.output)
    except UserError as error:
        print(f"precexp: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
