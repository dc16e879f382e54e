"""A sweep's launcher: the process that has the runs done, in itself or by jobs in other processes.

Launchers of one sweep share its directory. Each has a folder in `.launchers` there, which it locks
for as long as it lives: its jobs look there for what it wishes of them.
"""

import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from precexp.interrupts import NUMBERS
from precexp.record import in_use, lock_directory

LAUNCHERS = ".launchers"
POLL_SECONDS = 0.2  # between two looks of a job at its launcher

# Where the runs are done: in the launcher's own process, each in a worker that does one after the
# other, or each in a job process of its own.
Place = Literal["launcher", "workers", "jobs"]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What its jobs know of a launcher, in whatever process they are."""

    folder: Path
    began_ns: int  # by the clock of the file system
    place: Place
    environment: Mapping[str, str | None]  # of the jobs' processes; None: not set
    again: bool = False  # its runs were launched before; what has ended needs no second word

    def claim(self, config_hash: str) -> None:
        """Says that a job of this launcher works in the run."""
        (self.folder / config_hash).touch()

    def unclaim(self, config_hash: str) -> None:
        (self.folder / config_hash).unlink(missing_ok=True)

    def has_claimed(self, config_hash: str) -> bool:
        return (self.folder / config_hash).exists()

    def stop(self) -> None:
        """Tells all jobs to make a checkpoint and end, and that none is to start."""
        (self.folder / "stop").touch()

    @property
    def stops(self) -> bool:
        return (self.folder / "stop").exists() or not self.is_alive

    @property
    def is_alive(self) -> bool:
        try:
            descriptor = os.open(self.folder, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


@contextmanager
def launching(
    directory: Path,
    *,
    place: Place,
    environment: Mapping[str, str | None],
    settle: Callable[[bool], None],
) -> Iterator[Launcher]:
    """Makes this process a launcher of the sweep in the directory.

    `settle` is called while no launcher comes or goes, and told whether this one is alone. Raises
    RecordError if a single run works in the directory.
    """
    launchers = directory / LAUNCHERS
    launchers.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with one_at_a_time(directory):
            alone, lock = _enter(directory)
            stack.callback(os.close, lock)
            settle(alone)
            for left in launchers.iterdir() if alone else ():
                shutil.rmtree(left, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(dir=launchers)).absolute()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.callback(os.close, lock_directory(folder))
        yield Launcher(
            folder=folder,
            began_ns=folder.stat().st_mtime_ns,
            place=place,
            environment=environment,
        )


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Keeps the other launchers of the sweep from what is done in the context; waits for them."""
    descriptor = os.open(directory / LAUNCHERS, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _enter(directory: Path) -> tuple[bool, int]:
    """Shares the directory: whether no other launcher does, and the descriptor that says so."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        alone = _flock(descriptor, fcntl.LOCK_EX)
        if not _flock(descriptor, fcntl.LOCK_SH):
            raise in_use(directory)
    except BaseException:
        os.close(descriptor)
        raise
    return alone, descriptor


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def passing_on_signals(launcher: Launcher) -> Iterator[None]:
    """While jobs run elsewhere: SIGINT and SIGTERM stop them, and not this process.

    The engines that jobs run under kill them when their launcher raises, before they have made a
    checkpoint. So nothing is raised here: the jobs end, and with them the launch. A second signal
    of a kind ends this process, and the jobs, which see that it is gone, at once.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in NUMBERS}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_pass_on, args=(launcher, reader), daemon=True)
    thread.start()
    # Processes are born with the mask of the thread that starts them: a Ctrl-C, which a terminal
    # sends to all of them, is held back from each until it has a job, and a job that heeds it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()


def _pass_on(launcher: Launcher, reader: socket.socket) -> None:
    seen = set()
    while received := reader.recv(1):
        number = received[0]
        if number not in NUMBERS:
            continue
        if number in seen:
            os._exit(1)
        seen.add(number)
        launcher.stop()
        name = signal.Signals(number).name
        print(f"precexp: {name}: the runs make a checkpoint and end", file=sys.stderr, flush=True)


@contextmanager
def heeding(launcher: Launcher) -> Iterator[None]:
    """In a job's process: raises KeyboardInterrupt when the launcher stops its jobs, or is gone.

    A run in training makes a checkpoint first (`Interrupts`). No signal that a terminal sends to
    the launcher's process group gets here besides.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    for name, value in launcher.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    before = {number: signal.signal(number, signal.default_int_handler) for number in NUMBERS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(launcher, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _watch(launcher: Launcher, done: threading.Event) -> None:
    """Interrupts the main thread when the launcher stops its jobs, and when it is gone."""
    told = False
    while not done.wait(POLL_SECONDS):
        alive = launcher.is_alive
        if not alive or (launcher.stops and not told):
            told = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not alive:
            return


@contextmanager
def relaying(pattern: str) -> Iterator[None]:
    """Prints, as they come, the lines of the .out and .err files that match the pattern.

    An engine that gives each job its own output files would keep a failure from the user's eyes.
    """
    done = threading.Event()
    relay = _Relay(pattern)

    def follow() -> None:
        while not done.wait(POLL_SECONDS):
            relay.print_new()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        relay.print_new()


class _Relay:
    """Follows files as they grow; what they held before is not printed."""

    def __init__(self, pattern: str) -> None:
        self._pattern = Path(pattern)
        self._printed = {path: path.stat().st_size for path in self._files()}

    def _files(self) -> list[Path]:
        root = Path(self._pattern.anchor)
        relative = str(self._pattern.relative_to(root)) if self._pattern.anchor else None
        return sorted(root.glob(relative) if relative else Path().glob(str(self._pattern)))

    def print_new(self) -> None:
        for path in self._files():
            stream = {".out": sys.stdout, ".err": sys.stderr}.get(path.suffix)
            if stream is not None:
                with suppress(OSError):
                    self._print_lines(path, stream)

    def _print_lines(self, path: Path, stream: TextIO) -> None:
        with path.open("rb") as file:
            file.seek(self._printed.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._printed[path] = self._printed.get(path, 0) + len(line)
                if not line.startswith(b"submitit "):  # how the engine fares
                    stream.write(line.decode(errors="replace"))
        stream.flush()
