"""report.html: its text, and how it behaves in a real browser."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from precexp.report import Report, write_report
from precexp.report.charts import chart_data, thin_band, thin_indices, to_script
from precexp.report.curves import Band
from precexp.report.html import render_html, slug_of
from tests.test_report import STEPS, FakeRun, pair_of_arms, report_on, write_sweep
from tests.test_report_outputs import WARNING, troubled_sweep

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
ATTACK = '</script><img src=x onerror="window.attacked=true">\'"&`*ü — $css'
MIB = 2**20
REFERENCE, PURE = "fp32-anyprecision", "bf16_pure-anyprecision"


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


class Visit:
    """A page of the browser that notes everything it should not do."""

    def __init__(self, browser: "Browser", path: Path, **context: object) -> None:
        viewport = {"width": 1280, "height": 900}
        settings = {"viewport": viewport, "reduced_motion": "reduce", **context}  # no slow scrolls
        self.context = browser.new_context(**settings)  # type: ignore[arg-type]
        self.context.set_default_timeout(120_000)  # ms: a busy machine is slow, and not wrong
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url))
        self.page.goto(path.as_uri())

    def _note(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"request to {url}")

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def draw_all(self) -> None:
        """Scrolls every chart into sight and waits until it is drawn."""
        for chart in self.page.query_selector_all(".chart"):
            chart.evaluate("e => e.scrollIntoView({behavior: 'instant', block: 'center'})")
            self.page.wait_for_function("e => e.querySelector('.main-svg') !== null", arg=chart)

    def traces(self) -> list[dict[str, object]]:
        """Of every chart of curves: its kind, the arm of each trace and whether it is seen."""
        self.draw_all()
        return self.page.evaluate(
            """[...document.querySelectorAll(".chart")].flatMap(e => e.data
                .filter(t => t.meta)
                .map(t => ({kind: e.dataset.kind, arm: t.meta.arm, seen: t.visible !== false})))"""
        )


def memory_of(size: int) -> dict[str, object]:
    planned = {"peak_bytes": 4 * size * MIB, "categories": {"weights": size * MIB, "loss": 5 * MIB}}
    return {"planned": planned, "measured": None}


def two_arms(directory: Path) -> None:
    """Two arms of two seeds with all that a report can draw but a loss scale."""
    pure = [
        FakeRun(precision="bf16_pure", seed=s, loss=v, record={"memory": memory_of(20)})
        for s, v in ((1, 3.001), (2, 3.102))
    ]
    fp32 = [
        FakeRun(seed=s, loss=v, record={"memory": memory_of(40)}) for s, v in ((1, 3.0), (2, 3.1))
    ]
    write_sweep(directory, *fp32, *pure)


def page_of(directory: Path) -> Path:
    """report.html of the runs below the directory, in its report folder, without figures."""
    report = report_on(directory)
    report.output.mkdir(exist_ok=True)
    path = report.output / "report.html"
    path.write_text(render_html(report, report.output), encoding="utf-8")
    return path


def text_of(directory: Path) -> str:
    return page_of(directory).read_text(encoding="utf-8")


def payload_of(report: Report) -> dict[str, list[dict[str, list[dict[str, object]]]]]:
    return json.loads(to_script(chart_data(report, report.output)))


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    two_arms(directory)
    write_report(report_on(directory))
    return page_of(directory)


def test_thinning_keeps_the_extremes_the_ends_and_the_gaps() -> None:
    values = np.sin(np.arange(10_000.0) / 700)
    values[[1234, 5678]] = (9.0, -9.0)
    values[4321] = math.nan
    kept = set(thin_indices(values).tolist())
    assert {0, 1234, 4321, 5678, 9999} <= kept
    assert len(kept) <= 1003  # two of each of 500 buckets, the gap and the ends


@pytest.mark.parametrize("count", [1, 2, 999, 1000, 1001, 1499, 10_007])
def test_thinning_takes_any_length(count: int) -> None:
    kept = thin_indices(np.full(count, math.nan))
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert count > 1000 or len(kept) == count


def test_a_thinned_band_is_as_wide_as_its_widest_step() -> None:
    step = np.arange(5000)
    low, high = np.zeros(5000), np.ones(5000)
    low[777], high[2222] = -7, 8
    thinned = thin_band(Band(step=step, mean=np.full(5000, 0.5), low=low, high=high))
    assert len(thinned.step) <= 1002
    assert (thinned.low.min(), thinned.high.max()) == (-7, 8)


def test_the_data_is_strict_json_in_which_nothing_ends_the_script(tmp_path: Path) -> None:
    text = to_script({"label": "</script><!-- <script>"})
    assert "<" not in text
    assert json.loads(text) == {"label": "</script><!-- <script>"}
    write_sweep(tmp_path, FakeRun(loss=math.nan), FakeRun(seed=2, loss=math.inf))
    report = report_on(tmp_path)
    payload_of(report)  # would raise for NaN


def test_curves_lead_to_their_runs_and_refused_runs_are_not_drawn(tmp_path: Path) -> None:
    other = FakeRun(precision="bf16_pure", init_hash="other")
    (place, _) = write_sweep(tmp_path / "a sweep", FakeRun(), other)
    report = report_on(tmp_path / "a sweep")
    (run,) = payload_of(report)["groups"][0]["runs"]
    link = str(run["link"]).replace("%20", " ")
    assert (report.output / link).resolve() == place / "run.json"


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    troubled_sweep(tmp_path)
    report = report_on(tmp_path)
    write_report(report)
    assert render_html(report, report.output) == render_html(report_on(tmp_path), report.output)


def test_headings_have_the_anchors_of_github() -> None:
    assert slug_of("Runs & failures") == "runs--failures"
    assert slug_of("Memory & bytes per parameter") == "memory--bytes-per-parameter"
    assert slug_of("train.lr=0.001, größer_2") == "trainlr0001-größer_2"


def test_links_inside_the_page_lead_somewhere(tmp_path: Path) -> None:
    troubled_sweep(tmp_path)
    text = text_of(tmp_path)
    anchors = set(re.findall(r'id="([^"]+)"', text))
    links = set(re.findall(r'href="#([^"]+)"', text))
    assert {"runs--failures", "runs-of-0"} <= links
    assert links <= anchors


def test_cards_say_what_the_verdict_is_in_words(tmp_path: Path) -> None:
    troubled_sweep(tmp_path)
    cards = text_of(tmp_path).split('<section class="verdicts"')[1].split("</section>")[0]
    for words in ('data-verdict="reference"', 'data-verdict="undecided"', "1 + 1 diverged"):
        assert words in cards
    assert "4 of 7 runs went wrong, 1 of them diverged" in text_of(tmp_path)


def test_pictures_that_are_not_charts_lie_inside_and_others_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        "One": "![a dot](dot.png)\n\n![gone](gone.png)\n\n![far](http://127.0.0.1/far.png)",
        "Two": "Text with ![out](../sweep.json) and ![outside](../outside.png) in it.",
    }
    monkeypatch.setattr("precexp.report.html.sections", lambda report, output: found)
    write_sweep(tmp_path, FakeRun())
    output = tmp_path / "report"
    output.mkdir()
    (output / "dot.png").write_bytes(b"dot")
    (tmp_path / "outside.png").write_bytes(b"outside")
    text = render_html(report_on(tmp_path), output)
    assert re.findall(r"<img [^>]*>", text) == [
        '<img alt="a dot" src="data:image/png;base64,ZG90" class="picture">'
    ]


def test_a_chip_hides_its_arm_in_all_charts_and_all_is_silent(
    browser: "Browser", plain_page: Path
) -> None:
    with Visit(browser, plain_page) as visit:
        assert all(trace["seen"] for trace in visit.traces())
        kinds = [e.get_attribute("data-kind") for e in visit.page.query_selector_all(".chart")]
        assert kinds == ["eval", "gap", "train", "grad", "memory"]
        buttons = visit.page.locator(".modebar-btn").evaluate_all(
            "found => found.map(e => e.dataset.title || e.getAttribute('aria-label'))"
        )
        assert buttons
        assert not [title for title in buttons if re.search("share|cloud", title, re.I)]
        assert not visit.page.locator("img.static").first.is_visible()
        visit.page.get_by_role("button", name=PURE, exact=True).click()
        after = visit.traces()
        assert {trace["kind"] for trace in after} == {"eval", "gap", "train", "grad"}
        assert all(trace["seen"] == (trace["arm"] == 0) for trace in after)
        names = "document.querySelector('[data-kind=memory]').layout.annotations.map(a => a.text)"
        visit.page.wait_for_function(f"!{names}.includes({PURE!r})")  # it is drawn a moment later
        assert visit.complaints == []


def test_axes_smoothing_and_seeds(browser: "Browser", plain_page: Path) -> None:
    with Visit(browser, plain_page) as visit:
        before = len(visit.traces())
        visit.page.get_by_text("log x").click()
        visit.page.get_by_text("log y").click()
        visit.page.locator(".settings").get_by_text("tokens").click()
        visit.draw_all()
        axes = "document.querySelector('[data-kind=eval]').layout"
        assert visit.page.evaluate(f"[{axes}.xaxis.type, {axes}.yaxis.type]") == ["log", "log"]
        shown = "document.querySelector('[data-kind=eval]').data.at(-1)"
        assert visit.page.evaluate(f"{shown}.x") == [2048, 4096, 6144, 8192]
        visit.page.locator(".settings").get_by_text("seeds").click()
        assert len(visit.traces()) < before
        visit.page.locator("#smoothing").fill("20")
        names = "document.querySelector('[data-kind=train]').data.map(t => t.meta.what)"
        visit.draw_all()
        assert "mean of 2 seeds, smoothed" in visit.page.evaluate(names)
        assert visit.complaints == []


def test_points_lead_to_their_runs(browser: "Browser", plain_page: Path) -> None:
    with Visit(browser, plain_page) as visit:
        visit.draw_all()
        click = """([kind, what]) => {
            const e = document.querySelector(`[data-kind=${kind}]`);
            const data = e.data.find(t => t.meta && t.meta.what === what);
            e.emit("plotly_click", {points: [{data}]});
        }"""
        with visit.context.expect_page() as opened:
            visit.page.evaluate(click, ["eval", "seed 1"])
        opened.value.wait_for_load_state()
        assert json.loads(opened.value.locator("pre").inner_text())["seed"] == 1
        visit.page.evaluate(click, ["train", "mean of 2 seeds"])
        visit.page.wait_for_function("document.querySelectorAll('tr.lit').length === 2")
        assert REFERENCE in visit.page.locator("tr.lit").first.inner_text()


def test_tables_sort_by_number_and_by_key(browser: "Browser", plain_page: Path) -> None:
    with Visit(browser, plain_page) as visit:
        table = visit.page.locator("table", has_text="bytes/param").first
        head = table.locator("th", has_text="difference")
        head.get_by_role("button").focus()
        visit.page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert "–" in table.locator("tbody tr").last.inner_text()  # nothing to sort by: last
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        assert "–" in table.locator("tbody tr").last.inner_text()
        order = visit.page.evaluate(
            """() => {
                const table = document.querySelector("table").cloneNode(true);
                const values = ["1,234", "5.1466 ± 0.02", "–", "-0.0013", "never", "0.5 %"];
                const main = document.querySelector("table");
                main.tBodies[0].replaceChildren(...values.map(text => {
                    const row = table.tBodies[0].rows[0].cloneNode(true);
                    row.cells[1].textContent = text;
                    return row;
                }));
                main.querySelectorAll("th button")[1].click();
                return [...main.tBodies[0].rows].map(row => row.cells[1].textContent);
            }"""
        )
        assert order == ["-0.0013", "0.5 %", "5.1466 ± 0.02", "1,234", "never", "–"]


@pytest.mark.parametrize("allowed", [True, False])
def test_tables_copy_with_and_without_the_clipboard(
    browser: "Browser", plain_page: Path, allowed: bool
) -> None:
    with Visit(browser, plain_page) as visit:
        listen = """allowed => {
            window.copied = [];
            const refuse = () => Promise.reject(new Error("refused"));
            const accept = text => { window.copied.push(text); return Promise.resolve(); };
            Object.defineProperty(navigator, "clipboard",
                {value: {writeText: allowed ? accept : refuse}});
            document.addEventListener("copy", () =>
                window.copied.push(document.activeElement.value));
        }"""
        visit.page.evaluate(listen, allowed)
        button = visit.page.get_by_role("button", name="copy").first
        button.click()
        visit.page.wait_for_function("window.copied.length === 1")
        head, first, *_ = visit.page.evaluate("window.copied")[0].splitlines()
        assert head.split("\t")[:2] == ["arm", "seeds"]
        assert first.split("\t")[:2] == [REFERENCE, "2"]
        visit.page.get_by_role("button", name="copied").wait_for()


def test_a_phone_scrolls_down_only(browser: "Browser", tmp_path: Path) -> None:
    troubled_sweep(tmp_path)
    viewport = {"width": 390, "height": 844}
    with Visit(browser, page_of(tmp_path), viewport=viewport, has_touch=True) as visit:
        visit.draw_all()
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
        assert visit.complaints == []


def test_dark_pages_are_dark_and_paper_is_white(browser: "Browser", plain_page: Path) -> None:
    background = "getComputedStyle(document.documentElement).backgroundColor"
    ink = "document.querySelector('[data-kind=eval]').data.map(t => t.line.color)"
    with Visit(browser, plain_page, color_scheme="dark") as visit:
        assert visit.page.evaluate(background) == "rgb(16, 19, 22)"
        visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")  # nothing was in sight yet
        assert visit.page.locator(".chart .main-svg").count() >= 5
        assert "#000000" in visit.page.evaluate(ink)
        visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
        visit.page.locator("[data-kind=eval]").scroll_into_view_if_needed()
        visit.page.wait_for_function(f"{ink}.includes('#E8EAED')")
        visit.page.emulate_media(color_scheme="light")
        assert visit.page.evaluate(background) == "rgb(252, 252, 251)"
        visit.page.wait_for_function(f"{ink}.includes('#000000')")
        visit.page.emulate_media(color_scheme="dark", media="print")
        assert visit.page.evaluate(background) == "rgb(255, 255, 255)"
        assert visit.complaints == []


def test_without_scripts_the_pictures_show(browser: "Browser", plain_page: Path) -> None:
    with Visit(browser, plain_page, java_script_enabled=False) as visit:
        pictures = visit.page.locator("img.static")
        assert pictures.count() == 2
        assert all(pictures.nth(i).is_visible() for i in range(2))
        assert not visit.page.locator(".controls").is_visible()


def test_if_plotly_fails_the_pictures_show(browser: "Browser", plain_page: Path) -> None:
    broken = plain_page.with_name("broken.html")
    text = plain_page.read_text(encoding="utf-8")
    broken.write_text(text.replace("window.Plotly = Plotly", "window.nothing = 1"))
    with Visit(browser, broken) as visit:
        visit.page.locator("#loss-curves").scroll_into_view_if_needed()
        visit.page.locator("img.static").first.wait_for(state="visible")
        assert not visit.page.locator(".controls").is_visible()


def test_what_users_wrote_stays_text(browser: "Browser", tmp_path: Path) -> None:
    evil = {
        "arm": {"precision": "bf16_pure", "optim": "adamw", "overrides": {}, "label": ATTACK},
        "notices": [ATTACK],
        "warnings": [{**WARNING, "message": ATTACK}],
        "environment": {"precexp": ATTACK, "packages": {ATTACK: ATTACK}},
        "timing": {"started": ATTACK},
        "memory": memory_of(3),
    }
    runs = [
        FakeRun(precision="bf16_pure", record=evil),
        FakeRun(precision="bf16_pure", seed=2, status="failed", error=ATTACK, record=evil),
    ]
    directory = tmp_path / "a <b>sweep"
    write_sweep(directory, FakeRun(), *runs)
    with Visit(browser, page_of(directory)) as visit:
        visit.draw_all()
        assert visit.page.evaluate("window.attacked") is None
        assert visit.page.locator("img[src=x]").count() == 0
        assert visit.page.locator(".chip").last.inner_text() == ATTACK
        assert ATTACK in visit.page.locator(".card").last.inner_text()
        assert "a <b>sweep" in visit.page.locator("h1").inner_text()
        chart = visit.page.locator("[data-kind=memory]").inner_text()
        assert ATTACK.replace("`", "") in chart
        assert visit.complaints == []


@pytest.mark.parametrize(
    "runs",
    [
        [FakeRun(status=None), FakeRun(seed=2, status=None)],
        [FakeRun()],
        [FakeRun(loss=math.nan), FakeRun(precision="bf16_pure", loss=math.nan)],
        [
            FakeRun(status="diverged", steps=(1, 2)),
            FakeRun(precision="bf16_pure", status="diverged", steps=()),
        ],
        [FakeRun(), FakeRun(precision="bf16_pure", init_hash="other")],
        [FakeRun(loss=None), FakeRun(overrides={"train.lr": 2e-3}, precision="bf16_mixed")],
    ],
    ids=["nothing started", "one arm", "nan", "all diverged", "refused", "nothing comparable"],
)
def test_poor_records_still_make_a_page(
    browser: "Browser", tmp_path: Path, runs: list[FakeRun]
) -> None:
    write_sweep(tmp_path, *runs)
    with Visit(browser, page_of(tmp_path)) as visit:
        visit.draw_all()
        assert visit.page.locator("h2").count() >= 3
        assert visit.complaints == []


def test_unreadable_records_still_make_a_page(browser: "Browser", tmp_path: Path) -> None:
    (place,) = write_sweep(tmp_path, FakeRun())
    (place / "run.json").write_text("{")
    with Visit(browser, page_of(tmp_path)) as visit:
        assert "1 of 1 run went wrong" in visit.page.locator(".banner").inner_text()
        assert visit.complaints == []


def test_plotly_is_inside_once_where_something_is_drawn(tmp_path: Path) -> None:
    for name, runs in (("drawn", pair_of_arms()), ("empty", [FakeRun(status=None)])):
        write_sweep(tmp_path / name, *runs)
        count = text_of(tmp_path / name).count("plotly.js (basic - minified)")
        assert count == (name == "drawn")


def test_the_probes_of_an_arm_that_lost_something_are_open(
    browser: "Browser", tmp_path: Path
) -> None:
    lost = {step: {"decay_kept/all": 0.0, "moved/all": 0.5, "moved/norm": 0.1} for step in STEPS}
    kept = {step: {**row, "decay_kept/all": 1.0} for step, row in lost.items()}
    evil = {"precision": "bf16_pure", "optim": "adamw", "overrides": {}, "label": ATTACK}
    write_sweep(
        tmp_path,
        FakeRun(probes=kept),
        FakeRun(precision="bf16_pure", probes=lost, record={"arm": evil}),
    )
    with Visit(browser, page_of(tmp_path), viewport={"width": 390, "height": 800}) as visit:
        page = visit.page
        assert page.locator("details").count() == 2
        assert page.locator("details[open]").count() == 1
        panels = page.locator("details[open] .grid svg")
        assert panels.count() == 2
        assert all(panels.nth(i).is_visible() for i in range(2))
        assert panels.nth(1).get_attribute("aria-label") == "decay kept"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        line = page.locator("details[open] .line.norm title").first
        assert line.text_content() == "norm: 0.1 at step 4"
        assert page.evaluate("window.attacked") is None
        assert page.locator("img[src=x]").count() == 0
        assert visit.complaints == []
        page.locator("summary").first.click()
        assert page.locator("details[open]").count() == 2
