"""Which runs may be compared: those of one match_key, if their evidence agrees."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from precexp.config import match_key_without, matched_values
from precexp.record import RunRecord
from precexp.report.read import ReportedRun, block, number

FORCED = "forced"  # the match_key of a group of runs that do not match
TITLE_KEYS = 4  # more differing keys than this do not fit a title


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the hashes of a group say. `refused` runs are in no statistic and no curve."""

    refused: Mapping[Path, str]  # run directory: the reason
    unverified: Sequence[str]
    num_checked: int  # runs found equal to another run of their seed
    dropout: float


def match_groups(
    runs: Sequence[ReportedRun], tuned: Sequence[str] = ()
) -> dict[str, list[ReportedRun]]:
    """The recorded runs by match_key, in order of appearance.

    Runs that differ in the tuned keys alone belong together: then the key is made anew, without
    them, from the recorded config. A run without a record has no match_key: it joins the group if
    there is only one.
    """
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if (record := run.record) is not None:
            key = match_key_without(record.config, tuned) if tuned else record.match_key
            groups.setdefault(key, []).append(run)
    if len(groups) == 1:
        return {key: [run for run in runs if run.label is not None] for key in groups}
    return groups


def differing_values(
    groups: Mapping[str, Sequence[ReportedRun]], tuned: Sequence[str] = ()
) -> dict[str, list[str]]:
    """The matched keys that differ between groups: {full key: its value in each group}."""
    configs = [matched_values(_first_record(runs).config, tuned) for runs in groups.values()]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = {key: [spelled(config.get(key, "absent")) for config in configs] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def group_titles(
    groups: Mapping[str, Sequence[ReportedRun]], tuned: Sequence[str] = ()
) -> dict[str, str]:
    """What tells a group from the others, as `train.lr=0.001`; empty for an only group."""
    if len(groups) == 1:
        return dict.fromkeys(groups, "")
    differing = differing_values(groups, tuned)
    titles = {}
    for i, key in enumerate(groups):
        parts = [f"{name}={values[i]}" for name, values in list(differing.items())[:TITLE_KEYS]]
        if len(differing) > TITLE_KEYS:
            parts.append(f"{len(differing) - TITLE_KEYS} more keys")
        titles[key] = ", ".join(parts) or f"match_key {key[:8]}"
    return titles


def merge_groups(
    groups: Mapping[str, Sequence[ReportedRun]], titles: Mapping[str, str]
) -> dict[str, list[ReportedRun]]:
    """All runs as one group; an arm that is in several becomes as many, named by their titles."""
    counts = Counter(label for runs in groups.values() for label in {run.label for run in runs})
    merged = [
        replace(run, label=f"{run.label} ({titles[key]})") if counts[run.label] > 1 else run
        for key, runs in groups.items()
        for run in runs
    ]
    return {FORCED: merged}


def check_evidence(
    runs: Sequence[ReportedRun], *, reference: str | None, forced: bool = False
) -> Evidence:
    """Compares each run of a group with the reference's run of its seed, or else the seed's first.

    Initial weights must be equal, and the data served up to the last evaluation that both have.
    What disagrees is refused, unless the comparison is forced.
    """
    refused: dict[Path, str] = {}
    unverified: list[str] = []
    num_checked = 0
    recorded = [run for run in runs if run.record is not None]
    by_seed: dict[int, list[ReportedRun]] = {}
    # Stable: the reference first, but a run that ended before it had weights vouches for none.
    anchors_first = sorted(
        recorded,
        key=lambda run: (_record(run).evidence.get("init_hash") is None, run.label != reference),
    )
    for run in anchors_first:
        by_seed.setdefault(_record(run).seed, []).append(run)
    for anchor, *others in by_seed.values():
        for run in others:
            disagreement, unknown = _compare(_record(run), _record(anchor))
            if disagreement:
                reason = f"{run.label}, seed {run.seed}: {disagreement} {anchor.label}'s"
                if forced:
                    unverified.append(reason)
                else:
                    refused[run.directory] = reason
            elif unknown:
                unverified.append(f"{run.label}, seed {run.seed}: {unknown} with {anchor.label}")
            else:
                num_checked += 1
    dropouts = [number(block(_record(run).config, "model"), "dropout") or 0.0 for run in recorded]
    return Evidence(
        refused=refused,
        unverified=unverified,
        num_checked=num_checked,
        dropout=max(dropouts, default=0.0),
    )


def _compare(record: RunRecord, anchor: RunRecord) -> tuple[str | None, str | None]:
    """What disagrees, and else what could not be compared."""
    init = [run.evidence.get("init_hash") for run in (record, anchor)]
    if None not in init and init[0] != init[1]:
        return "init_hash (the initial weights) differs from", None
    served, anchor_served = (block(run.evidence, "data_hash_at") for run in (record, anchor))
    common = sorted(served.keys() & anchor_served.keys(), key=int)
    if common and served[common[-1]] != anchor_served[common[-1]]:
        return f"data_hash at step {common[-1]} (the tokens served) differs from", None
    if None in init:
        return None, "no init_hash to compare"
    return None, None if common else "no evaluation step in common"


def _record(run: ReportedRun) -> RunRecord:
    assert run.record is not None
    return run.record


def _first_record(runs: Sequence[ReportedRun]) -> RunRecord:
    return next(_recorded(runs))


def _recorded(runs: Sequence[ReportedRun]) -> Iterator[RunRecord]:
    return (run.record for run in runs if run.record is not None)


def spelled(value: object) -> str:
    """A value of a config as it would be typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
