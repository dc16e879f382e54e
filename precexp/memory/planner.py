"""Plans in a process of their own, so that a fault in fake tensors is an error and no crash."""

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any

from precexp.config import RunConfig, UserError, as_dict

COMMAND = (sys.executable, "-m", "precexp.memory")


class PlanError(RuntimeError):
    """The planning process failed: one line."""


class Planner(AbstractContextManager["Planner"]):
    """Plans one run after the other in one process, which imports torch once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def plan(self, config: RunConfig) -> dict[str, Any]:
        """The plan as in `plan.output` (docs/record.md), for `plan.device`.

        With `ways_out`, smaller configs of the same training, and `fit` where `plan.gpu_memory` is
        given. Raises UserError for what cannot be planned, PlanError for a fault.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(as_dict(config)) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = process.stdout.readline()
        if not line:
            raise self._died()
        answer = json.loads(line)
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        if "fault" in answer:
            raise PlanError(f"plan: {answer['fault']}")
        return answer

    def close(self) -> None:
        """Ends the process; the next plan starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _died(self) -> PlanError:
        assert self._process is not None
        code = self._process.wait()
        self._process = None
        return PlanError(f"plan: the planning process died with exit code {code}")
