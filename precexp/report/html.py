"""report.html: the whole report as one file that needs no network."""

import base64
import html
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt
from markdown_it.token import Token

from precexp.report.build import Group, Report, problem
from precexp.report.cards import cards_of, icon, swatch
from precexp.report.charts import Json, chart_data, charts_of, style_of, to_script
from precexp.report.markdown import sections, title_of
from precexp.report.multiples import multiples_html
from precexp.report.numerics import findings
from precexp.report.probes import ArmProbes, probed_arms
from precexp.report.protocol import has_chart, picture_of
from precexp.report.tables import NOTHING, plural
from precexp.report.tuning_charts import tuning_html

PAGE = Path(__file__).parent / "page"
IMAGE_TYPES = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
RUNS = "Runs & failures"  # the section whose table has a row per run
# What a column of numbers may hold: a number, and behind it words such as its spread.
NUMBER = re.compile(r"[+-]?(\d[\d,]*\.?\d*|\.\d+|inf|nan)(e[+-]?\d+)?(\s.*|%.*)?$|never$")
LONG = 30  # characters of a cell that need a column of some width
CAPTIONS = {
    "eval": "Eval loss <span>nats per token</span>",
    "gap": "Difference in eval loss to {reference} <span>nats per token, by seed{noise}</span>",
    "train": "Training loss <span>nats per token, every step</span>",
    "grad": "Gradient norm <span>before clipping</span>",
    "scale": "Loss scale <span>crosses are skipped steps</span>",
}
NOISE = "; the bar at the right is ± the standard deviation of the reference's own seeds"
WIDE = ("eval", "gap")
HINT = (
    "Click a point for its run, drag to zoom, double-click to return. The first tenth of the steps "
    "does not set the vertical scale. Smoothing is of the mean training loss and gradient norm."
)


@dataclass(kw_only=True)
class Context:
    """What the passes over the Markdown share."""

    report: Report
    output: Path
    charts: Json
    probed: Mapping[str, ArmProbes]  # by the name of the picture that their panels stand for
    tunings: Mapping[str, Group]  # by the name of the picture that their charts stand for
    used: set[str] = field(default_factory=set)  # pictures that became charts: once each


def render_html(report: Report, output: Path) -> str:
    """The text of report.html; links to runs are relative to `output`, where it will lie.

    The figures that the Markdown names are read from `output`. The same records give the same text.
    """
    charts = chart_data(report, output)
    probed = {found.picture: found for found in probed_arms(report)}
    numbered = enumerate(report.groups, 1)
    tunings = {picture_of(number): group for number, group in numbered if has_chart(group)}
    context = Context(report=report, output=output, charts=charts, probed=probed, tunings=tunings)
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    found = sections(report, output)
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in found.items())
    tokens = parser.parse(text)
    contents = _anchor_headings(tokens)
    tokens = list(_place_images(tokens, context))
    _mark_arms(tokens, context)
    tokens = list(_wrap_tables(tokens))
    title = title_of(report)
    body = parser.renderer.render(list(_wrap_sections(tokens)), parser.options, {})
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        heading=html.escape(title),
        about=" ".join(_about(report)),
        banners="\n".join(_banners(report, found)),
        contents="\n".join(
            f'<li><a href="#{slug}">{html.escape(words)}</a></li>' for slug, words in contents
        ),
        cards=cards_of(report),
        body=body,
        payload=to_script(charts),
        css=_asset("page.css"),
        js=_asset("page.js"),
        plotly=_asset("plotly-basic.min.js") if context.used else "",
    )


def slug_of(text: str) -> str:
    """The anchor that GitHub gives a heading: `Runs & failures` is `runs--failures`."""
    kept = (
        character
        for character in text.strip().lower()
        if character in " -_" or unicodedata.category(character)[0] in "LNM"
    )
    return "".join(kept).replace(" ", "-")


def _asset(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _about(report: Report) -> Iterator[str]:
    """How much there is to see, in a line."""
    seeds = {run.seed for run in report.runs if run.seed is not None}
    parts = [
        plural(len(report.runs), "run"),
        plural(len(report.labels), "arm"),
        plural(len(seeds), "seed"),
    ]
    if len(report.groups) > 1:
        parts.append(f"{len(report.groups)} groups that are not compared with each other")
    started = [
        str(run.record.timing["started"])
        for run in report.runs
        if run.record is not None and run.record.timing.get("started")
    ]
    if newest := max(filter(None, map(_day, started)), default=None):
        parts.append(f"newest run of {newest:%-d %B %Y}")
    precexps = {
        str(version)
        for run in report.runs
        if run.record is not None and (version := run.record.environment.get("precexp"))
    }
    if precexps:
        parts.append(f"precexp {', '.join(sorted(precexps))}")
    yield from (f"<span>{html.escape(part)}</span>" for part in parts)


def _day(text: str) -> datetime | None:
    """The time, whatever its zone; None of what is none, as a record is anyone's to write."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _banners(report: Report, found: Mapping[str, str]) -> Iterator[str]:
    """What a reader must know before the cards, with where to read on."""
    refused = sum(len(group.evidence.refused) for group in report.groups)
    failed = [run for run in report.runs if problem(run) is not None]
    diverged = sum(run.status == "diverged" for run in failed)
    banners = []
    if report.forced:
        banners.append(
            ("Forced: these runs do not match, so no verdict is one on precision alone.", "Verdict")
        )
    if failed:
        words = f", {diverged} of them diverged" if diverged else ""
        banners.append(
            (f"{len(failed)} of {plural(len(report.runs), 'run')} went wrong{words}.", RUNS)
        )
    if refused:
        banners.append(
            (
                f"{plural(refused, 'run')} refused: initial weights or data differ from the "
                "reference's.",
                "Matched check",
            )
        )
    for words, section in banners:
        link = ""
        if section in found:
            link = f' <a href="#{slug_of(section)}">{html.escape(section)}</a>'
        yield f'<p class="banner" role="note">{icon("worse")}<span>{words}{link}</span></p>'


def _anchor_headings(tokens: Sequence[Token]) -> list[tuple[str, str]]:
    """Gives each heading its anchor; returns anchor and words of the sections."""
    counts: dict[str, int] = {}
    contents = []
    for token, inline in pairwise(tokens):
        if token.type != "heading_open":
            continue
        words = _words(inline)
        slug = slug_of(words)
        repeats = counts.get(slug, 0)
        counts[slug] = repeats + 1
        anchor = f"{slug}-{repeats}" if repeats else slug
        token.attrSet("id", anchor)
        if token.tag == "h2":
            contents.append((anchor, words))
    return contents


def _wrap_sections(tokens: Sequence[Token]) -> Iterator[Token]:
    """Each heading of the second level begins a section, which the next one ends."""
    opened = False
    for token in tokens:
        if token.type == "heading_open" and token.tag == "h2":
            yield _raw("html_block", "</section>\n<section>\n" if opened else "<section>\n")
            opened = True
        yield token
    if opened:
        yield _raw("html_block", "</section>\n")


def _place_images(tokens: Sequence[Token], context: Context) -> Iterator[Token]:
    """Pictures as charts or inside the page: a paragraph that is one becomes a block."""
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token.type == "paragraph_open" and not token.hidden:
            children = tokens[i + 1].children or []
            if len(children) == 1 and children[0].type == "image":
                yield _raw("html_block", _picture(children[0], context, alone=True))
                i += 3
                continue
        for child in token.children or []:
            if child.type == "image":
                content = _picture(child, context, alone=False)
                child.type, child.content, child.children = "html_inline", content, None
        yield token
        i += 1


def _picture(token: Token, context: Context, *, alone: bool) -> str:
    """The chart of the picture's name, the picture itself, or nothing where it is not there."""
    name = str(token.attrGet("src") or "")
    if name in context.probed:
        return _multiples(context.probed[name])
    if name in context.tunings:
        return tuning_html(context.tunings[name], context.report)
    path = context.output / name
    kind = IMAGE_TYPES.get(path.suffix.lower())
    inside = path.resolve().is_relative_to(context.output.resolve())
    image = ""
    if kind and inside and path.is_file():
        content = base64.b64encode(path.read_bytes()).decode("ascii")
        alt = html.escape(_words(token))
        image = f'<img alt="{alt}" src="data:{kind};base64,{content}"'
    charts = _charts(name, context) if alone and name not in context.used else ""
    if charts:
        context.used.add(name)
        fallback = f'{image} class="static">' if image else ""
        return f'<div class="charts">\n{charts}\n{fallback}\n</div>\n'
    return f'{image} class="picture">\n' if image else ""


def _multiples(found: ArmProbes) -> str:
    """An arm's panels, open where it lost something."""
    shown = " open" if findings(found) else ""
    return (
        f"<details{shown}><summary>Probes over the steps</summary>{multiples_html(found)}"
        "</details>\n"
    )


def _charts(name: str, context: Context) -> str:
    """The interactive charts that stand for the picture; empty if there is nothing to draw."""
    if name == "memory.svg" and context.charts["memory"]:
        return (
            '<figure class="interactive panel wide"><div class="chart" data-kind="memory"></div>'
            "</figure>"
        )
    panels = charts_of(context.charts)
    if name != "loss_curves.svg" or not any(panels):
        return ""
    report = context.report
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-arm="{i}">'
        f"{swatch(style_of(label, report.labels))}<span>{html.escape(label)}</span></button>"
        for i, label in enumerate(report.labels)
    )
    seconds = '<label><input type="radio" name="x" value="seconds"><span>seconds</span></label>'
    controls = Template(_asset("controls.html")).substitute(
        chips=chips, seconds=seconds if context.charts["seconds"] else ""
    )
    parts = [controls]
    for i, (group, kinds) in enumerate(zip(report.groups, panels, strict=True)):
        if group.title and kinds:
            parts.append(f"<h3>{html.escape(group.title)}</h3>")
        parts.append('<div class="panels">')
        for kind in kinds:
            caption = CAPTIONS[kind].format(
                reference=html.escape(group.reference or ""),
                noise=NOISE if group.noise is not None else "",
            )
            parts.append(
                f'<figure class="panel{" wide" if kind in WIDE else ""}">'
                f"<figcaption>{caption}</figcaption>"
                f'<div class="chart" data-kind="{kind}" data-group="{i}"></div></figure>'
            )
        parts.append("</div>")
    parts.append(f'<p class="hint">{HINT}</p>')
    return f'<div class="interactive">{"".join(parts)}</div>'


def _mark_arms(tokens: Sequence[Token], context: Context) -> None:
    """Arms get their colour wherever they are named, and lead to their rows in the table of runs.

    The rows there get the anchors.
    """
    section = title = ""
    depth: list[str] = []
    anchored: set[int] = set()
    row = None
    for i, token in enumerate(tokens):
        if token.type == "tr_open":
            row = token
        if token.type.endswith("_open"):
            depth.append(token.type)
        elif token.type.endswith("_close"):
            depth.pop()
        if token.type != "inline":
            continue
        if "heading_open" in depth:
            words = _words(token)
            section, title = (words, "") if tokens[i - 1].tag == "h2" else (section, words)
            continue
        in_runs = section == RUNS and "tbody_open" in depth
        children = token.children or []
        links = 0
        for j, child in enumerate(children):
            links += (child.type == "link_open") - (child.type == "link_close")
            label = _label(child, context.report) if child.type == "code_inline" else None
            if label is None:
                continue
            after = children[j + 1].content if j + 1 < len(children) else ""
            number = _number_of(label, after, title, context.report)
            leads = not (in_runs or links or "thead_open" in depth or number is None)
            child.type = "html_inline"
            child.content = _arm(label, number if leads else None, context.report)
            if in_runs and number is not None and row is not None and j == 0:
                row.attrSet("data-runs", str(number))
                if number not in anchored:
                    row.attrSet("id", f"runs-of-{number}")
                anchored.add(number)
                row = None


def _label(code: Token, report: Report) -> str | None:
    """The arm that the code names; a table's cell spells `<` as `&lt;`."""
    text = code.content
    for label in report.labels:
        if text in (label, " ".join(label.split()).replace("<", "&lt;")):
            return label
    return None


def _number_of(label: str, after: str, title: str, report: Report) -> int | None:
    """The number of the arm among those of all groups, by the group's title near its name."""
    arms = [(arm, group) for group in report.groups for arm in group.arms]
    numbers = [i for i, (arm, _) in enumerate(arms) if arm.label == label]
    if len(report.groups) == 1:
        return numbers[0]
    for i in numbers:
        name = " ".join(arms[i][1].title.split())
        if title == name or after.startswith(f" ({name})"):
            return i
    return None


def _arm(label: str, number: int | None, report: Report) -> str:
    content = f"{swatch(style_of(label, report.labels))}<code>{html.escape(label)}</code>"
    if number is None:
        return f'<span class="arm">{content}</span>'
    return f'<a class="arm" href="#runs-of-{number}">{content}</a>'


def _wrap_tables(tokens: Sequence[Token]) -> Iterator[Token]:
    """Tables scroll by themselves, and their columns of numbers are set flush right."""
    for i, token in enumerate(tokens):
        if token.type == "table_open":
            _align(tokens, i)
            yield _raw(
                "html_block",
                '<div class="table"><div class="scroll" tabindex="0" role="region" '
                'aria-label="Table">\n',
            )
        yield token
        if token.type == "table_close":
            yield _raw("html_block", "</div></div>\n")


def _align(tokens: Sequence[Token], start: int) -> None:
    columns: list[list[Token]] = []
    texts: list[list[str]] = []
    column = -1
    for token, inline in pairwise(tokens[start:]):
        if token.type == "table_close":
            break
        if token.type == "tr_open":
            column = -1
        elif token.type in ("th_open", "td_open"):
            column += 1
            if column == len(columns):
                columns.append([])
                texts.append([])
            columns[column].append(token)
            if token.type == "td_open":
                texts[column].append(_words(inline))
    for cells, found in zip(columns, texts, strict=True):
        measured = [text for text in found if text not in (NOTHING, "")]
        # A word among numbers, as `diverged` for a loss, does not change what the column is.
        if 2 * sum(NUMBER.match(text) is not None for text in measured) > len(measured):
            kind = "num"
        elif max(map(len, found), default=0) > LONG:
            kind = "text"
        else:
            continue
        for cell in cells:
            cell.attrSet("class", kind)


def _words(inline: Token) -> str:
    """The text of the token's children, without their marks."""
    parts = [child.content for child in inline.children or [] if child.type != "html_inline"]
    return "".join(parts).strip()


def _raw(kind: str, content: str) -> Token:
    return Token(kind, "", 0, content=content)
