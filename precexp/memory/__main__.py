"""The process that plans: reads a request per line of stdin, writes an answer per line of stdout.

planner.py is the other end.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from precexp import set_process_defaults
from precexp.config import UserError, load, parse_bytes


def main() -> None:
    set_process_defaults()
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(values: dict[str, Any]) -> dict[str, Any]:
    try:
        from precexp.memory.advice import fit, ways_out
        from precexp.memory.plan import plan

        config = load(OmegaConf.create(values))
        planned = plan(config, device=config.plan.device)
        answer = planned.as_record()
        answer["ways_out"] = [asdict(way) for way in ways_out(config, planned)]
        answer["fit"] = None
        if config.plan.gpu_memory is not None:
            memory_bytes = parse_bytes("plan.gpu_memory", config.plan.gpu_memory)
            answer["fit"] = asdict(fit(config, planned, memory_bytes=memory_bytes))
        return answer
    except UserError as error:
        return {"user_error": str(error)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"fault": f"{type(error).__name__}: {lines[0]}"}


if __name__ == "__main__":
    main()
