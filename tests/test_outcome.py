"""What a run's rows come to, in time."""

import pytest

from precexp.outcome import Outcome
from precexp.record import Row


def row(step: int, seconds: float) -> Row:
    return Row(
        step=step, tokens=100 * step, loss=2.0, eval_loss=None, grad_norm=1.0, lr=0.1,
        loss_scale=None, skipped=False, step_seconds=seconds, peak_bytes=None, probes=None,
    )  # fmt: skip


def outcome_of(*seconds: float) -> Outcome:
    outcome = Outcome(began=10.0, eval_bytes_per_token=4.0)
    for step, each in enumerate(seconds, start=1):
        outcome.write(row(step, each))
    return outcome


def test_the_first_step_is_no_part_of_the_speed_and_has_what_compiling_took() -> None:
    timing = outcome_of(7.0, 1.0, 2.0, 3.0).timing(setup_ended=14.0, compiled=True)
    assert timing["first_step_seconds"] == 7.0
    assert timing["step_seconds_median"] == 2.0
    assert timing["compile_seconds"] == 5.0
    assert timing["tokens_per_second"] == pytest.approx(300 / 6.0)
    assert timing["setup_seconds"] == 4.0  # whenever the first row came


def test_what_did_not_compile_or_has_one_step_has_no_time_of_compiling() -> None:
    assert outcome_of(7.0, 1.0).timing(setup_ended=14.0, compiled=False)["compile_seconds"] is None
    one = outcome_of(7.0).timing(setup_ended=14.0, compiled=True)
    assert one["compile_seconds"] is one["tokens_per_second"] is None


def test_a_resumed_runs_earlier_steps_count_but_its_first_is_this_attempts() -> None:
    outcome = Outcome(began=10.0, eval_bytes_per_token=4.0)
    outcome.replay([row(1, 9.0), row(2, 1.0)])
    outcome.write(row(3, 5.0))
    outcome.write(row(4, 3.0))
    timing = outcome.timing(setup_ended=11.0, compiled=True)
    assert timing["step_seconds_median"] == 2.0
    assert timing["first_step_seconds"] == 5.0
