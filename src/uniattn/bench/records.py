"""What a run measured, as data that survives JSON. Everything that renders it takes these and nothing else."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
OURS = "uniattn"


@dataclass
class Result:
    """One provider on one row.

    Attributes:
        status: `ok`, or why there is no time: `not covered: ...`, `wrong: ...`, `failed: ...`.
        rounds_us: device microseconds a call, one number a round; empty unless `ok`.
        plan_us: device microseconds of what a step's layers share; None where there is nothing or no graph can hold it.
        plan_failure: why no graph could hold it, where that was tried.
        relative_error: norm of the error over norm of the oracle's output, on the sampled tokens.
        max_error: largest error of an element.  error_of_allowed: largest error over what is allowed at its place.
    """

    status: str = "ok"
    rounds_us: list[float] = field(default_factory=list)
    plan_us: float | None = None
    plan_failure: str | None = None
    relative_error: float | None = None
    max_error: float | None = None
    error_of_allowed: float | None = None

    @property
    def us(self) -> float | None:
        """Median of the rounds; None without a time."""
        return statistics.median(self.rounds_us) if self.status == "ok" and self.rounds_us else None

    @property
    def spread_us(self) -> float:
        """Slowest less fastest round."""
        return max(self.rounds_us) - min(self.rounds_us) if self.rounds_us else 0.0


@dataclass
class Row:
    """One workload with what it costs at least and what each provider, by key, made of it."""

    name: str
    group: str
    shape: str
    runs: list[tuple[int, int, int]]  # (count, q_len, kv_len)
    flops: float
    bytes: float
    floor_us: float
    x: int | None = None
    results: dict[str, Result] = field(default_factory=dict)

    def us(self, key: str) -> float | None:
        """Median time of a provider, None without one."""
        result = self.results.get(key)
        return None if result is None else result.us


@dataclass
class Host:
    """Host microseconds of one eager call on a small batch; None where a provider has no such call."""

    run_us: float
    unplanned_us: float | None = None
    plan_us: float | None = None


@dataclass
class Report:
    """One run.

    Attributes:
        facts: versions, card, driver, date: what a reader needs to repeat it.
        peak_flops, peak_bytes: what floors were computed from, FLOP/s and bytes/s.  peak_source: where these come from.
        labels: providers that ran, key to label, uniattn first.
        missing: providers that did not, label to reason.
    """

    facts: dict[str, str]
    peak_flops: float
    peak_bytes: float
    peak_source: str
    labels: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    host: dict[str, Host] = field(default_factory=dict)

    def peers(self) -> list[str]:
        """Keys of the providers beside uniattn."""
        return [key for key in self.labels if key != OURS]

    def groups(self) -> list[str]:
        """Groups in the order of their first rows."""
        return list(dict.fromkeys(row.group for row in self.rows))


def save(report: Report, path: Path) -> None:
    """Write `report` as JSON."""
    path.write_text(json.dumps({"format": FORMAT, **asdict(report)}, indent=1) + "\n")


def load(path: Path) -> Report:
    """Read what `save` wrote. Raises `ValueError` for anything else."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise ValueError(f"{path} is of another format than {FORMAT}")
        data["rows"] = [
            Row(**{**row, "runs": [tuple(run) for run in row["runs"]], "results": _each(Result, row["results"])})
            for row in data["rows"]
        ]
        data["host"] = _each(Host, data["host"])
        return Report(**data)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no saved run of this bench ({error})") from error


def _each(kind: Any, data: dict[str, dict]) -> dict[str, Any]:
    return {key: kind(**value) for key, value in data.items()}
