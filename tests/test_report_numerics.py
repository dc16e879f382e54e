"""The numerics section: sentences that follow from probes by rules, warnings, panels, the CSV."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from precexp.report import write_report
from precexp.report.multiples import multiples_file, multiples_html, panels
from precexp.report.numerics import findings, sentences
from precexp.report.probes import KINDS, ArmProbes, probed_arms
from tests.test_report import FakeRun, report_on, write_sweep
from tests.test_report_outputs import WARNING, markdown_of, printed, rows_of, section_of

PUBLISHED = "bf16_pure-anyprecision_published"
HEALTHY = {  # of a bf16 arm with the default optimizer
    "moved": 0.93,
    "update_kept": 0.7,
    "update_kept_compensated": 0.999,
    "decay_kept": 1.001,
    "variance_ratio": 1.01,
    "gradient_underflow": 0.0,
    "gradient_overflow": 0.0,
    "update_to_weight": 2e-3,
}


def probes_of(**changed: float | None) -> dict[str, float]:
    """A healthy row with these values, `probe__kind` for one kind; None leaves the probe out."""
    row = {
        f"{probe}/{kind}": value
        for probe, value in HEALTHY.items()
        for kind in KINDS
        if not (probe == "decay_kept" and kind in ("norm", "bias"))  # these do not decay
    }
    for name, value in changed.items():
        probe, _, kind = name.partition("__")
        for key in [f"{probe}/{kind}"] if kind else [k for k in row if k.startswith(f"{probe}/")]:
            if value is None:
                row.pop(key, None)
            else:
                row[key] = value
    return row


def probed(
    directory: Path,
    *rows: dict[str, float],
    precision: str = "bf16_pure",
    optim: str = "anyprecision",
    overrides: dict[str, object] | None = None,
    rates: Sequence[float] = (),
) -> ArmProbes:
    """The one arm of a sweep whose run has these probes at steps 1, 2, ..."""
    run = FakeRun(
        precision=precision,
        optim=optim,
        overrides=overrides or {},
        steps=tuple(range(1, len(rows) + 1)),
        probes=dict(enumerate(rows, start=1)),
        lr=dict(enumerate(rates, start=1)),
    )
    write_sweep(directory, run)
    (found,) = probed_arms(report_on(directory))
    return found


def codes(found: ArmProbes) -> list[str]:
    return [finding.code for finding in findings(found)]


@pytest.mark.parametrize(
    ("precision", "changed"),
    [
        ("fp32", {"moved": 1.0, "update_kept": 1.0, "update_kept_compensated": None}),
        ("fp32", {"moved": 0.4, "update_kept": 1.0, "update_kept_compensated": None}),
        ("bf16_mixed", {"moved": 1.0, "update_kept": 0.9999, "update_kept_compensated": None}),
        ("bf16_pure", {}),
        ("bf16_pure", {"moved": 0.002, "update_kept": 0.0}),  # a tiny lr: the compensation has it
        ("bf16_pure", {"variance_ratio": 0.95, "decay_kept": 0.97}),
        ("bf16_pure", dict.fromkeys(HEALTHY)),
    ],
)
def test_a_healthy_arm_gets_one_calm_sentence(
    precision: str, changed: dict[str, float | None], tmp_path: Path
) -> None:
    row = {**probes_of(**changed), "loss_scale_backoffs": 0.0}
    found = probed(tmp_path, *[row] * 4, precision=precision)
    assert codes(found) == []
    (sentence,) = sentences(found)
    assert sentence.startswith("Nothing lost")


def test_decay_that_is_lost_is_told_with_its_threshold_and_remedy(tmp_path: Path) -> None:
    rate: dict[str, object] = {"train.lr": 2e-4, "train.weight_decay": 0.1}
    found = probed(
        tmp_path,
        *[probes_of(decay_kept=0.0)] * 4,
        optim="anyprecision_published",
        overrides=rate,
    )
    assert sentences(found) == [
        "0 % of the decay reached the weights from step 1 on, the first that was probed: lr x "
        "weight_decay = 2e-05 at most, below 2^-9 = 0.002; use decay inside the "
        "compensation (optim=anyprecision with optim.decay=inside)."
    ]


def test_the_step_from_which_decay_is_lost_is_the_first_of_the_rest(tmp_path: Path) -> None:
    kept = [0.0, 0.9, 0.1, 0.0, 0.0, 0.0, 0.0]
    overrides: dict[str, object] = {"optim.stochastic_rounding": False}
    rows = [probes_of(decay_kept=value) for value in kept]
    (sentence,) = sentences(probed(tmp_path / "nearest", *rows, overrides=overrides))
    assert "from step 3 on:" in sentence
    assert "stochastic_rounding=auto" in sentence  # with Kahan and the decay inside
    (sentence,) = sentences(probed(tmp_path / "stochastic", *rows))
    assert sentence.endswith("; use a larger lr or weight_decay.")


@pytest.mark.parametrize(
    ("kept", "rates", "level"),
    [
        ([1.0, 0.0], [1e-3, 1e-5], 1.0),  # the schedule's end, where next to nothing is asked
        ([1.0, 0.0], [1e-5, 1e-3], 0.0),
        ([1.0, 0.0, 0.2, 0.9], [1e-3, 1e-3, 1e-3, 1e-3], 0.55),
        ([1.0, 0.0], [0.0, 0.0], 0.5),  # no step moves
    ],
)
def test_decay_counts_by_the_learning_rate_of_its_step(
    kept: list[float], rates: list[float], level: float, tmp_path: Path
) -> None:
    rows = [probes_of(decay_kept=value, moved=value) for value in kept]
    found = probed(tmp_path, *rows, rates=rates)
    assert found.level("decay_kept") == level
    assert found.level("moved") == np.median(kept)


def test_noise_where_the_learning_rate_is_small_is_no_noise_of_the_decay(tmp_path: Path) -> None:
    kept = [0.6, 0.61, 0.6, 0.61, 0.6, 2.0, -2.0]
    rows = [probes_of(decay_kept=value) for value in kept]
    assert codes(probed(tmp_path / "even", *rows)) == []
    rates = [1e-3] * 5 + [1e-6] * 2
    assert codes(probed(tmp_path / "falling", *rows, rates=rates)) == ["decay_lost"]


def test_decay_lost_of_float32_weights_names_their_threshold(tmp_path: Path) -> None:
    rate: dict[str, object] = {"train.lr": 1e-7, "train.weight_decay": 0.1}
    rows = [probes_of(decay_kept=0.0)] * 4
    found = probed(tmp_path, *rows, precision="fp32", overrides=rate)
    (sentence,) = sentences(found)
    assert sentence.endswith("below 2^-25 = 3e-08; use a larger lr or weight_decay.")


def test_noise_of_the_kept_decay_is_no_loss(tmp_path: Path) -> None:
    kept = [1.5, 0.6, 1.3, 0.7, 0.5, 1.1, 0.75]
    assert codes(probed(tmp_path, *(probes_of(decay_kept=value) for value in kept))) == []


def test_random_rounding_keeps_updates_on_average(tmp_path: Path) -> None:
    rows = [probes_of(update_kept=v, update_kept_compensated=None) for v in (-3.0, 0.1, 0.4, 2.0)]
    overrides: dict[str, object] = {
        "optim.weight_rounding": "stochastic",
        "optim.use_kahan_summation": False,
    }
    assert codes(probed(tmp_path, *rows, overrides=overrides)) == []


def test_a_stalled_variance_is_told_by_its_end(tmp_path: Path) -> None:
    rows = [probes_of(variance_ratio=v, variance_ratio__norm=2 * v) for v in (1.0, 1.0, 1.2, 3.1)]
    found = probed(tmp_path, *rows, overrides={"train.beta2": 0.999})
    assert codes(found) == ["variance_stalls"]
    (sentence,) = sentences(found)
    assert "is 2.15 times its fp32 shadow at the end (norm: 4.3)" in sentence  # (1.2 + 3.1) / 2
    assert "so that an update is 0.682 of what it should be" in sentence  # 2.15^-0.5
    assert "beta2 = 0.999 in bfloat16" in sentence


def test_the_norm_group_is_told_by_itself(tmp_path: Path) -> None:
    row = probes_of(
        update_kept=0.97, update_kept__norm=0.03, moved__norm=0.02, update_kept_compensated=None
    )
    (sentence,) = sentences(probed(tmp_path, *[row] * 4))
    assert "Only 3 % of the updates of the norm weights reached them" in sentence
    assert "98 % of the norm weights did not move in a step" in sentence
    assert "use Kahan summation" in sentence


def test_weights_that_freeze_towards_the_end_are_found(tmp_path: Path) -> None:
    rows = [probes_of(update_kept_compensated=None, update_kept=v) for v in [1.0] * 6 + [0.2] * 2]
    assert codes(probed(tmp_path, *rows)) == ["updates_lost"]


def test_gradients_that_underflow_are_told(tmp_path: Path) -> None:
    found = probed(tmp_path, probes_of(gradient_underflow=0.31))
    assert codes(found) == ["gradients_underflow"]
    assert sentences(found)[0].startswith("31 % of the gradients underflowed to zero")


def test_probes_are_means_over_the_completed_seeds(tmp_path: Path) -> None:
    values = {1: 0.2, 2: 0.6, 3: 55.0}
    write_sweep(
        tmp_path,
        *(
            FakeRun(
                seed=seed,
                probes={2: probes_of(moved=moved)},
                status="completed" if seed < 3 else "running",
            )
            for seed, moved in values.items()
        ),
    )
    (found,) = probed_arms(report_on(tmp_path))
    assert found.level("moved") == pytest.approx(0.4)
    write_report(report_on(tmp_path))
    rows = rows_of(tmp_path / "report" / "numerics.csv")
    moved = [row for row in rows if (row["probe"], row["kind"]) == ("moved", "all")]
    assert [(row["seed"], row["step"]) for row in moved] == [("1", "2"), ("2", "2"), ("mean", "2")]
    assert [float(row["value"]) for row in moved] == pytest.approx([0.2, 0.6, 0.4])


def test_without_probes_there_is_no_csv_and_no_section(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun())
    assert "## Numerics" not in markdown_of(tmp_path)
    assert not (tmp_path / "report" / "numerics.csv").exists()


def test_probes_that_are_no_numbers_are_not_read(tmp_path: Path) -> None:
    run = FakeRun(probes={1: {"moved/all": math.nan}}, status="running")  # its rows have no seal
    (place,) = write_sweep(tmp_path, run)
    rows = place / "metrics.jsonl"
    text = rows.read_text(encoding="utf-8").replace('"probes": null', '"probes": {"moved/all": []}')
    rows.write_text(text, encoding="utf-8")
    (read,) = report_on(tmp_path).runs
    assert read.status == "running"
    assert probed_arms(report_on(tmp_path)) == []


def test_one_warning_of_several_seeds_is_one_row(tmp_path: Path) -> None:
    own = {**WARNING, "message": "50 % of the weights did not change"}
    write_sweep(
        tmp_path,
        *(
            FakeRun(seed=seed, overrides={"train.lr": lr}, record={"warnings": found})
            for lr in (1e-3, 2e-3)
            for seed, found in ((1, [WARNING]), (2, [WARNING, own]))
        ),
    )
    section = section_of(markdown_of(tmp_path), "Numerics")
    rows = [line for line in section.splitlines() if WARNING["code"] in line]
    assert len(rows) == 4  # two messages in each of two groups
    assert sum("| 2 | 40 % of the weights" in row for row in rows) == 2
    assert "(train.lr=0.002)" in rows[-1]


def test_the_terminal_has_a_line_for_each_thing_lost(tmp_path: Path) -> None:
    lost = [probes_of(decay_kept=0.0)] * 4
    warnings = [
        {**WARNING, "code": "decay_lost", "message": "said by the probes already"},
        {**WARNING, "code": "eps_is_zero", "message": "eps is zero; remedy: more"},
    ]
    write_sweep(
        tmp_path,
        FakeRun(
            probes=dict(enumerate([probes_of()] * 4, start=1)), record={"warnings": warnings[1:]}
        ),
        FakeRun(
            precision="bf16_pure",
            probes=dict(enumerate(lost, start=1)),
            record={"warnings": warnings},
        ),
    )
    text = printed(tmp_path, width=300)
    assert "bf16_pure-anyprecision: 0 % of the decay reached the weights" in text
    assert "fp32-anyprecision and bf16_pure-anyprecision: eps is zero.\n" in text
    assert "use " not in text  # remedies stand in the report
    assert "said by the probes already" not in text
    assert "Nothing lost" not in text


def test_the_terminal_says_that_nothing_was_lost(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(probes={1: probes_of()}))
    assert "the probes of 1 arm saw nothing lost" in printed(tmp_path, width=200)


def test_panels_are_drawn_for_what_was_probed(tmp_path: Path) -> None:
    rows = [probes_of(gradient_underflow=None, gradient_overflow=None)] * 3
    found = probed(tmp_path, *rows)
    assert len(list(panels(found))) == 6
    root = ElementTree.fromstring(multiples_file(found))
    lines = [element for element in root.iter() if element.get("class") == "line norm"]
    assert len(lines) == 6  # a legend, and five panels: norms do not decay
    texts = "".join(root.itertext())
    for words in ("2^-9: half a bf16 unit", "1: unbiased", "decay kept", "norm: 0.93 at step 3"):
        assert words in texts


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -3.0, 1e30])
def test_panels_hold_any_number(value: float, tmp_path: Path) -> None:
    rows = [probes_of(), probes_of(**dict.fromkeys(HEALTHY, value)), probes_of()]
    for drawn in (multiples_file, multiples_html):
        _check_places(drawn, probed(tmp_path / drawn.__name__, *rows))


def _check_places(drawn: Callable[[ArmProbes], str], found: ArmProbes) -> None:
    text = drawn(found)
    assert "nan" not in text
    assert "inf" not in text.replace("infinite", "")
    for element in ElementTree.fromstring(text).iter():
        if (element.get("class") or "").startswith("line") and (path := element.get("d")):
            numbers = path.replace("M", " ").replace("L", " ").replace("h", " ").split()
            assert all(-5 <= float(number) <= 600 for number in numbers)


def test_long_series_are_thinned_and_keep_their_spikes(tmp_path: Path) -> None:
    found = probed(tmp_path, probes_of(), probes_of())
    band = replace(found.bands["moved", "all"])
    step = np.arange(1, 10_001)
    values = np.full(10_000, 0.5)
    values[7000] = 0.0
    long = replace(band, step=step, mean=values, low=values, high=values)
    found.bands["moved", "all"] = long  # type: ignore[index]
    panel = next(panels(found))
    path = panel.split('class="line all"')[1].split('d="')[1].split('"')[0]
    assert path.count("L") < 2 * 40
    assert "130.0" in path  # the bottom of the panel


def test_markdown_shows_a_picture_and_the_sentences_of_each_arm(tmp_path: Path) -> None:
    lost = FakeRun(precision="bf16_pure", probes={1: probes_of(decay_kept=0.0)})
    write_sweep(tmp_path, FakeRun(probes={1: probes_of()}), lost)
    section = section_of(markdown_of(tmp_path), "Numerics")
    assert "![The probes of fp32-anyprecision](numerics-1.svg)" in section
    assert "- 0 % of the decay reached the weights" in section
    assert section.count("- Nothing lost") == 1
    assert {path.name for path in (tmp_path / "report").glob("numerics-*.svg")} == {
        "numerics-1.svg",
        "numerics-2.svg",
    }
