"""The published memory table: what reproduces it, and the record of that."""

import json
from pathlib import Path

import pytest

from precexp.bench import published_table
from precexp.bench.published_table import PUBLISHED, Reproduced

RECORD = Path(__file__).parents[1] / "outputs/reference/published_table.json"


@pytest.fixture(scope="module")
def rows() -> dict[str, Reproduced]:
    return {each.inventory: each for each in published_table.bench(output=None)}


@pytest.mark.parametrize(
    ("inventory", "peaked"),
    [
        ("fp32 weights, HF's AdamW", 123.09),
        ("bf16 weights, AnyPrecisionAdamW", 124.32),
        ("fp32 weights, AnyPrecisionAdamW", 156.32),
    ],
)
def test_one_step_rises_as_far_as_the_temporaries_of_its_loop(
    inventory: str, peaked: float, rows: dict[str, Reproduced]
) -> None:
    assert rows[inventory].peaked_mib == pytest.approx(peaked, abs=0.2)


def test_a_second_step_rises_higher_than_any_published_cell(rows: dict[str, Reproduced]) -> None:
    assert all(row.peaked_by_two_steps_mib > 400 for row in rows.values())


def test_the_published_cells_are_those_of_two_inventories_and_not_of_the_third(
    rows: dict[str, Reproduced],
) -> None:
    mixed, pure, refuted = rows.values()
    for row in (mixed, pure):
        assert int(row.peaked_mib) == row.published_peaked_mib
        assert int(row.inventory_mib) == row.published_alloc_mib
        assert row.unexplained_mib == pytest.approx(PUBLISHED[row.row]["init"], abs=1)
    assert int(refuted.peaked_mib) != refuted.published_peaked_mib


def test_the_record_holds_these_numbers(rows: dict[str, Reproduced]) -> None:
    recorded = {row["inventory"]: row for row in json.loads(RECORD.read_text())["rows"]}
    for name, row in rows.items():
        assert recorded[name]["peaked_mib"] == row.peaked_mib
        assert recorded[name]["peaked_by_two_steps_mib"] == row.peaked_by_two_steps_mib
