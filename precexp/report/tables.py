"""How verdicts and numbers are spelled for people, and tables of them in Markdown."""

import math
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from precexp.report.build import ArmResult, Group

MIB = 2**20
NOTHING = "–"  # not measured
MARKS = re.compile(r"[*_`\[\]]")


def verdict_of(arm: ArmResult, group: Group) -> str | None:
    """The arm's verdict; `reference` for the reference, None where there is nothing to compare."""
    if arm.comparison is not None:
        return arm.comparison.verdict
    return "reference" if arm.label == group.reference and len(group.arms) > 1 else None


def fixed(value: float | None, digits: int = 4, *, sign: bool = False) -> str:
    """The number with so many decimals, or a dash."""
    if value is None:
        return NOTHING
    plus = "+" if sign else ""
    if 0 < abs(value) < 10**-digits:  # or it would read as nothing
        return f"{value:{plus}.2g}"
    return f"{value:{plus}.{digits}f}" if math.isfinite(value) else str(value)


def whole(value: float | None) -> str:
    """The number rounded, with thousands set apart."""
    return NOTHING if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """The number in at most four significant digits."""
    return NOTHING if value is None else f"{value:.4g}"


def mib(num_bytes: float | None) -> str:
    """Bytes in MiB = 2^20 bytes."""
    return "not measured" if num_bytes is None else f"{num_bytes / MIB:,.1f}"


def spell_interval(low: float | None, high: float | None) -> str:
    """Both ends with their signs, or a dash."""
    return NOTHING if low is None else f"{fixed(low, sign=True)} to {fixed(high, sign=True)}"


def percent(fraction: float) -> str:
    """0.005 as 0.5 %."""
    return f"{100 * fraction:.3g} %"


def plural(count: int, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def heading(group: Group) -> Iterator[str]:
    """What tells the group from others, as a heading; nothing for an only group."""
    if group.title:
        yield f"### {escape(group.title)}"
        yield ""


def link_to(directory: Path, output: Path, text: str) -> str:
    """A link to a run's record, relative to where the report lies."""
    return f"[{text}]({address_of(directory, output)})"


def address_of(directory: Path, output: Path) -> str:
    """The run's run.json, or what else there is, as a URL relative to where the report lies."""
    record = directory / "run.json"
    found = record if record.exists() else directory
    relative = Path(os.path.relpath(found.resolve(), output.resolve()))
    return urllib.parse.quote(relative.as_posix())


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(escape(cell) for cell in row)} |"


def as_text(text: str) -> str:
    """The text on one line, with nothing in it that Markdown would read as its own."""
    return MARKS.sub(r"\\\g<0>", escape(text))


def escape(text: str) -> str:
    """The text on one line, without what would break a table or be read as HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
