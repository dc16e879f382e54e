"""The dashboard: what it leaves offline, what it sends, and that it updates instead of adding.

Offline runs are read back with wandb's own reader, views with wandb-workspaces itself. What is sent
online goes to a stand-in (tests/wandb_server.py): no test here says that wandb's server takes it.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

pytest.importorskip("wandb_workspaces")

import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces.internal import View

import precexp
from precexp import dashboard, tracking
from precexp.comparison import compare
from precexp.config import WandbConfig
from precexp.dashboard import main, recorded_wandb
from precexp.record import Row, RunRecord
from precexp.report import build_report
from precexp.report.palette import COLOURS
from precexp.workspace import PROBES, build_workspace, write_workspace
from tests.test_report import FakeRun, write_sweep
from tests.wandb_server import KEY, WandbServer, clean_wandb, only, records_of, serving, summary_of

FP32, PURE = "fp32-anyprecision", "bf16_pure-anyprecision"
LOSSES = MappingProxyType({(FP32, 1): 3.0, (FP32, 2): 3.1, (PURE, 1): 3.001, (PURE, 2): 3.102})
CONFIG = WandbConfig(mode="offline", project="precexp", entity=None, tags=())


def write_runs(sweep: Path, *, losses: Mapping[tuple[str, int], float] = LOSSES) -> None:
    """A sweep and what its runs' tracking leaves beside their records, without what is in it."""
    for (label, seed), loss in losses.items():
        run = FakeRun(precision=label.split("-")[0], seed=seed, loss=loss)
        place = run.write(sweep)
        folder = place / "wandb" / f"offline-run-20260101_000000-{wandb_id(label, seed)}"
        folder.mkdir(parents=True)


def wandb_id(label: str, seed: int) -> str:
    return f"{label.split('-')[0].replace('_', '')}{seed}"


@pytest.fixture(autouse=True)
def _clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with clean_wandb(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that was shown twice without a key."""
    sweep = tmp_path_factory.mktemp("outputs") / "demo"
    write_runs(sweep)
    with clean_wandb(tmp_path_factory.mktemp("home")):
        assert [main([str(sweep)]), main([str(sweep)])] == [0, 0]
    return sweep


@pytest.fixture(scope="module")
def records(offline: Path) -> list[dict[str, dict]]:
    return records_of(offline / "report")  # asserts that there is one run


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with serving(monkeypatch) as server:
        yield server


def test_the_comparison_is_a_run_of_the_sweeps_group(records: list[dict[str, dict]]) -> None:
    (run,) = only(records, "run")
    assert (run["project"], run["run_group"]) == ("precexp", "demo")
    assert run["job_type"] == run["display_name"] == "comparison"
    assert run["config"]["update"]["sweeps"] == ["demo"]
    assert only(records, "exit")[0]["exit_code"] == 0


def test_differences_are_a_curve_over_steps(records: list[dict[str, dict]]) -> None:
    rows = [history["item"] for history in only(records, "history")]
    (key,) = {key for row in rows for key in row if key.startswith("difference/")}
    assert key.startswith(f"difference/{PURE}/")
    curve = {row["step"]: row[key] for row in rows if key in row}
    assert curve == pytest.approx({1: 0, 2: 0, 3: 0, 4: 0.0015})
    axes = [metric for metric in only(records, "metric") if metric.get("step_metric")]
    assert [(axis["glob_name"], axis["step_metric"]) for axis in axes] == [("difference/*", "step")]


def test_verdicts_are_in_the_summary(records: list[dict[str, dict]]) -> None:
    verdicts = summary_of(records)["verdicts"]
    assert {label: verdict["verdict"] for label, verdict in verdicts.items()} == {
        FP32: "reference",
        PURE: "equivalent",
    }
    assert verdicts[PURE]["difference"] == pytest.approx(0.0015)


def test_tables_have_typed_values_and_no_path(offline: Path, records: list[dict]) -> None:
    (folder,) = (offline / "report" / "wandb").glob("offline-run-*")
    kept = {}
    for name in ("arms", "runs"):
        path = summary_of(records)[f"{name}.path"]
        table = json.loads((folder / "files" / path).read_text())
        kept[name] = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["label"] for row in kept["arms"]] == [FP32, PURE]
    assert (kept["arms"][1]["num_seeds"], kept["arms"][0]["difference"]) == (2, None)
    assert kept["arms"][1]["difference"] == pytest.approx(0.0015)
    assert {(row["arm"], row["seed"]): row["final_eval_loss"] for row in kept["runs"]} == LOSSES
    assert all(isinstance(row["config_hash"], str) for row in kept["runs"])
    assert "directory" not in kept["runs"][0]


def test_figures_and_the_page_are_kept(offline: Path, records: list[dict[str, dict]]) -> None:
    summary = summary_of(records)
    (folder,) = (offline / "report" / "wandb").glob("offline-run-*")
    for key, name in (("figures/loss_curves", "loss_curves.png"), ("report", "report.html")):
        kept = folder / "files" / summary[f"{key}.path"]
        assert kept.read_bytes() == (offline / "report" / name).read_bytes()
    assert "figures/memory.path" not in summary, "there is none"


def test_tables_are_staged_where_the_run_is(offline: Path) -> None:
    """An offline run refers to them until it is uploaded; of two attempts one set is left."""
    staged = list((offline / "report" / "wandb" / "artifacts" / "staging").iterdir())
    assert len(staged) == 4  # of two tables, each with its metadata


def test_offline_says_how_to_push_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    write_runs(Path("demo"))
    assert main(["demo", "wandb.mode=offline", "wandb.project=mine", "--output=out"]) == 0
    printed, errors = capfd.readouterr()
    (folder,) = Path("out/wandb").glob("offline-run-*")
    uploads, comparison, workspace = printed.splitlines()
    assert uploads == "runs: kept offline; to upload: wandb sync demo/*/*/wandb/offline-run-*"
    assert comparison.startswith("comparison: offline (as asked); to upload: wandb sync ")
    assert comparison.endswith(str(folder))
    command = "python -m precexp.dashboard demo wandb.project=mine --output=out wandb.mode=online"
    assert workspace.endswith(f"out/workspace.json; to save it in wandb: {command}")
    assert errors == ""
    assert only(records_of(Path("out")), "run")[0]["project"] == "mine"


def test_the_view_reads_back_as_it_was_written(offline: Path) -> None:
    text = (offline / "report" / "workspace.json").read_text()
    assert write_workspace(read_back(text)) == text


def read_back(text: str) -> ws.Workspace:
    return ws.Workspace._from_model(View.model_validate_json(text))


def view_of(sweep: Path) -> str:
    report = build_report([sweep], reference=None, margin=0.01)
    comparison = compare(report, sweep / "report", project="precexp")
    return write_workspace(build_workspace(comparison, CONFIG, entity="somebody"))


def sections_of(spec: dict) -> dict[str, list[dict]]:
    """The panels by section, as the library sends them."""
    sections = spec["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in sections}


def test_sections_show_what_tracking_logs(offline: Path) -> None:
    sections = sections_of(json.loads(view_of(offline))["spec"])
    assert list(sections) == [
        "Verdict",
        "Loss",
        "Difference to reference",
        "Memory",
        "Speed",
        "Training",
        "Numerics",
    ]
    panels = [panel for found in sections.values() for panel in found]
    configs = [p["config"] for p in panels if p["viewType"] == "Run History Line Plot"]
    lines = {(config["xAxis"], *config["metrics"]) for config in configs}
    assert lines >= {
        ("tokens", "eval_loss"),
        ("step", "eval_loss"),
        ("tokens", "loss"),
        ("step", "loss"),
        ("step", "step_seconds"),
        ("step", "grad_norm"),
        ("step", "lr"),
        ("step", "loss_scale"),
        ("step", "skipped"),
    }
    elsewhere = ("difference/", "numerics/")
    drawn = {key for line in lines for key in line if not key.startswith(elsewhere)}
    assert drawn <= Row.__dataclass_fields__.keys()

    configs = [panel["config"] for panel in panels if panel["viewType"] == "Bar Chart"]
    bars = {key for config in configs for key in config["metrics"]}
    assert bars >= {"timing.tokens_per_second", "memory.measured.peak_bytes"}
    assert bars <= set(flat(tracking._summary(a_record())))
    probes = [panel["config"].get("metricRegex") for panel in sections["Numerics"]]
    assert probes == [*(f"^numerics/{probe}/.*" for probe in PROBES), None]
    assert f"| {PURE} | equivalent |" in sections["Verdict"][0]["config"]["value"]


def a_record() -> RunRecord:
    parts = ("weights", "gradients", "states", "total")
    return RunRecord(
        run_id="a-run",
        config_hash="",
        match_key="",
        arm={},
        seed=1,
        config={},
        census={"bytes_per_param": dict.fromkeys(parts, 2.0)},
        memory={"planned": {"peak_bytes": 1}, "measured": {"peak_bytes": 1}},
        timing={"tokens_per_second": 1.0},
        results={"skipped_steps": 0},
    )


def flat(values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_runs_are_grouped_by_arm_in_the_reports_colours(offline: Path) -> None:
    text = view_of(offline)
    spec, settings = json.loads(text)["spec"], read_back(text).runset_settings
    (runset,) = spec["section"]["runSets"]
    assert runset["grouping"] == [{"section": "run", "name": "jobType"}]
    (folder,) = (offline / "report" / "wandb").glob("offline-run-*")
    comparison = folder.name.rpartition("-")[2]
    by_run = {one: setting.color for one, setting in settings.run_settings.items()}
    assert by_run == {
        wandb_id(FP32, 1): COLOURS[0],
        wandb_id(FP32, 2): COLOURS[0],
        wandb_id(PURE, 1): COLOURS[1],
        wandb_id(PURE, 2): COLOURS[1],
        comparison: "#999999",
    }
    assert settings.group_colors == {
        FP32: COLOURS[0],
        PURE: COLOURS[1],
        "comparison": "#999999",
    }
    (shown,) = runset["filters"]["filters"]
    assert (shown["key"], shown["op"]) == ({"section": "run", "name": "name"}, "IN")
    assert set(shown["value"]) == set(by_run), "no other runs of the project"

    (difference,) = sections_of(spec)["Difference to reference"]
    (line,) = difference["config"]["overrideColors"].items()
    assert line[0] == f"{comparison}:{difference['config']['metrics'][0]}"
    assert line[1]["color"] == COLOURS[1]


def test_runs_that_do_not_match_are_not_averaged(tmp_path: Path) -> None:
    other = FakeRun(seed=1, overrides={"train.lr": 2e-3})
    write_sweep(tmp_path, FakeRun(seed=1), other)
    text = view_of(tmp_path)
    (runset,) = json.loads(text)["spec"]["section"]["runSets"]
    assert [key["name"] for key in runset["grouping"]] == ["match_key.value", "jobType"]
    paths = read_back(text).runset_settings.group_colors
    assert len(paths) == 2
    assert set(paths.values()) == {COLOURS[0]}, "one arm, one colour"


def test_of_tuned_arms_the_runs_that_are_compared_are_shown(tmp_path: Path) -> None:
    sweep = tmp_path / "tuned"
    losses = {(FP32, 1e-3): 3.0, (FP32, 2e-3): 4.0, (PURE, 1e-3): 4.0, (PURE, 2e-3): 3.0}
    for i, ((label, lr), loss) in enumerate(losses.items()):
        for seed in (1, 2, 3):
            run = FakeRun(
                precision=label.split("-")[0], seed=seed, loss=loss, overrides={"train.lr": lr}
            )
            (run.write(sweep) / "wandb" / f"offline-run-20260101_000000-{i}{seed}").mkdir(
                parents=True
            )
    report = build_report([sweep], reference=None, margin=0.005, tuned=("train.lr",))
    comparison = compare(report, sweep / "report", project="precexp")
    assert comparison.arm_of == {"02": FP32, "03": FP32, "32": PURE, "33": PURE}
    settings = build_workspace(comparison, CONFIG, entity="").runset_settings
    assert settings.group_colors == {
        FP32: COLOURS[0],
        PURE: COLOURS[1],
        "comparison": "#999999",
    }


def test_any_name_of_a_directory_makes_a_view(tmp_path: Path) -> None:
    write_sweep(tmp_path / "lr=1e-3 + b'c", FakeRun(status=None))
    assert read_back(view_of(tmp_path / "lr=1e-3 + b'c")).name == "precexp lr-1e-3 - b-c"


def test_online_sends_the_comparison_and_the_view(
    server: WandbServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path / "demo")
    assert main([str(tmp_path / "demo")]) == 0
    (name,) = server.runs
    printed, errors = capfd.readouterr()
    place = f"{server.url}/somebody/precexp"
    assert printed.splitlines()[1:] == [
        f"comparison: {place}/runs/{name}",
        f"workspace: {place}?nw={name[:11]}",
    ]
    assert errors == ""
    upsert = server.upserts[0]
    assert (upsert["name"], upsert["groupName"], upsert["jobType"]) == (name, "demo", "comparison")
    assert upsert["program"] == "precexp"
    assert server.runs[name].exit_codes == [0]
    assert any(path.startswith("media/table/arms") for path in server.files)
    (view,) = server.views
    assert (view.name, view.display_name) == (f"nw-{name[:11]}-v", "precexp demo")
    written = json.loads((tmp_path / "demo/report/workspace.json").read_text())
    assert written["entity"] == "somebody"
    run = server.runs[name]
    sent = "\n".join([run.config, run.summary, *run.history, view.spec]).encode()
    sent += b"".join(server.files.values())
    assert b"config_hash" in sent, "what is sent can be searched as text"
    for text in (KEY, str(tmp_path), sys.executable):
        assert text.encode() not in sent


def test_a_second_call_resumes_the_run_and_updates_the_view(
    server: WandbServer, tmp_path: Path
) -> None:
    sweep = tmp_path / "demo"
    write_runs(sweep)
    assert main([str(sweep)]) == 0
    (run,) = server.runs.values()
    first = list(run.rows)
    server.operations.clear()

    assert main([str(sweep)]) == 0
    assert list(server.runs.values()) == [run], "one comparison"
    assert "RunResumeStatus" in server.operations
    assert run.rows[: len(first)] == first
    (again,) = run.rows[len(first) :]
    assert not [key for key in again if key.startswith("difference/")], "no row comes twice"
    assert "arms" in again
    assert [row["_step"] for row in run.rows] == list(range(len(run.rows)))

    FakeRun(seed=3, loss=3.2).write(sweep)
    FakeRun(precision="bf16_pure", seed=3, loss=3.4).write(sweep)
    assert main([str(sweep)]) == 0
    (view,) = server.views
    (panel,) = sections_of(json.loads(view.spec))["Difference to reference"]
    (key,) = panel["config"]["metrics"]
    assert [row["step"] for row in run.rows if key in row] == [1, 2, 3, 4]
    assert not [row for row in first if key in row], "what has changed is another curve"
    assert json.loads(run.summary)["differences"] == [key]


def test_an_offline_comparison_that_was_uploaded_is_gone_on_with(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = tmp_path / "demo"
    write_runs(sweep)
    assert main([str(sweep), "wandb.mode=offline"]) == 0
    (folder,) = (sweep / "report" / "wandb").glob("offline-run-*")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=60)
    (run,) = server.runs.values()
    assert [row.get("step") for row in run.rows] == [1, 2, 3, 4, None]
    assert any(path.startswith("media/table/arms") for path in server.files)

    assert main([str(sweep)]) == 0
    assert list(server.runs.values()) == [run]
    assert [row.get("step") for row in run.rows] == [1, 2, 3, 4, None, None]


def test_a_view_that_is_refused_is_one_line_and_kept_as_a_file(
    server: WandbServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.refused.add("UpsertView2")
    write_runs(tmp_path / "demo")
    assert main([str(tmp_path / "demo")]) == 1
    printed, errors = capfd.readouterr()
    assert printed == ""
    (line,) = errors.splitlines()
    assert line.startswith("error: workspace: not saved (")
    assert (tmp_path / "demo/report/workspace.json").exists()
    (run,) = server.runs.values()
    assert run.exit_codes == [0], "the comparison is there"


@pytest.mark.parametrize("mode", ["online", "auto"])
def test_a_server_out_of_reach_fails_only_what_was_asked_and_keeps_all(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "INIT_SECONDS", 1)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    write_runs(tmp_path / "demo")
    code = main([str(tmp_path / "demo"), f"wandb.mode={mode}"])
    printed, errors = capfd.readouterr()
    if mode == "online":
        (line,) = errors.splitlines()
        assert code == 1
        assert line.startswith("error: wandb.mode=online: CommError: ")
    else:
        _, line, _ = printed.splitlines()
        assert code == 0
        assert line.startswith("comparison: offline (CommError: ")
    assert "; to upload: wandb sync " in line
    report = tmp_path / "demo/report"
    assert len(only(records_of(report), "history")) == 5
    assert (report / "workspace.json").exists()


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        ("log", OSError("disk full"), "comparison: not logged (OSError: disk full)"),
        ("finish", TimeoutError(), "comparison: upload given up; to complete it: wandb sync "),
    ],
)
def test_a_failure_of_wandb_is_one_line(
    method: str,
    error: Exception,
    said: str,
    server: WandbServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import wandb

    real = wandb.Run.finish

    def fail(run: wandb.Run, *_: object, **__: object) -> None:
        if method == "finish":
            real(run)
        raise error

    monkeypatch.setattr(wandb.Run, method, fail)
    write_runs(tmp_path / "demo")
    assert main([str(tmp_path / "demo")]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert server.views == []
    assert (tmp_path / "demo/report/workspace.json").exists()


def test_online_without_a_key_is_the_users_to_mend(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path / "demo")
    assert main([str(tmp_path / "demo"), "wandb.mode=online"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "wandb.mode: online is not possible (no API key)" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no directory given; allowed: DIR"),
        (["{empty}"], "no run.json and no sweep.json"),
        (["{empty}/nowhere"], "no such directory"),
        (["{empty}", "--nope"], "--nope: unknown argument; allowed: DIR"),
        (["{empty}", "wandb.nope=1"], "wandb.nope=1: unknown argument; allowed: DIR"),
        (["{empty}", "wandb.mode=onlin"], "wandb.mode: 'onlin' is not allowed; allowed: auto, "),
        (["{empty}", "wandb.project="], "wandb.project: no value"),
        (["{empty}", "report.margin=wide"], "report.margin: 'wide' is not a number"),
    ],
)
def test_a_mistake_of_the_users_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(empty=tmp_path) for argument in arguments]) == 2
    printed, errors = capfd.readouterr()
    assert printed == ""
    (line,) = errors.splitlines()
    assert said in line
    if "unknown argument" in line or "no directory" in line:
        assert line.endswith("wandb.mode=auto|online|offline")
    assert not list(tmp_path.iterdir())


def test_project_entity_and_mode_are_those_of_the_records(tmp_path: Path) -> None:
    block: dict[str, object] = {
        "wandb.project": "theirs",
        "wandb.entity": "a-team",
        "wandb.mode": "disabled",
    }
    FakeRun(overrides=block).write(tmp_path)
    found = recorded_wandb([tmp_path])
    assert (found.project, found.entity, found.mode) == ("theirs", "a-team", "disabled")
    assert recorded_wandb([tmp_path / "nothing"]).project == "precexp"


def test_runs_that_stayed_away_from_wandb_are_compared_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    FakeRun(overrides={"wandb.mode": "disabled"}).write(tmp_path)
    assert main([str(tmp_path)]) == 0
    first, second, _ = capfd.readouterr().out.splitlines()
    assert first == "runs: wandb has nothing of 1 of 1, which only the comparison shows"
    assert second.startswith("comparison: offline (as asked)")


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dashboard.importlib.util, "find_spec", lambda name: None)
    FakeRun().write(tmp_path)
    assert main([str(tmp_path)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "pip install 'precexp[dashboard]'" in line


def test_the_library_is_imported_by_one_module_that_one_function_imports() -> None:
    for path in Path(precexp.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        if path.name != "workspace.py":
            assert not [name for name in names if name.startswith("wandb_workspaces")], path
        top = {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
        assert "precexp.workspace" not in top, path
