"""SIGINT and SIGTERM as a wish that the training loop looks at between two steps."""

import os
import signal
import threading
from types import FrameType, TracebackType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While its context is open, the first signal is noted in `asked`; a second ends the process.

    Both kinds count apart: a terminal and a parent process may each send one. Outside the main
    thread, which alone gets signals, nothing changes.
    """

    def __init__(self) -> None:
        self.asked: str | None = None  # the signal's name
        self._seen: set[int] = set()
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._seen.add(number)
        self.asked = signal.Signals(number).name
