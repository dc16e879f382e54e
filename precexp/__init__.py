"""precexp: the referee for training precision."""

import os

__version__ = "0.1.0"


def set_process_defaults() -> None:
    """Sets, where the user has not, what torch reads from the environment; call before its import.

    A spinning OpenMP thread slows a second busy process tenfold. Kineto, which counts the memory of
    a step on a CPU, says so on stderr each time.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
