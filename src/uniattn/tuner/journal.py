"""What has been measured so far, on disk: an interrupted `uniattn tune` goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Results by question, appended to a file of JSON lines as they come.

    Args:
        path: the file; its folder exists.
        stamp: what the results hold for (card, versions, source). A file of another stamp is begun anew.
        fresh: begin anew in any case.
    """

    def __init__(self, path: Path, stamp: dict[str, Any], fresh: bool = False):
        self._path = path
        self._known: dict[str, Any] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() and not fresh else []
        records = [record for record in map(_parsed, lines) if record is not None]
        kept: list[Any] = records if records and records[0] == {"stamp": stamp} else [{"stamp": stamp}]
        self._known = {record["question"]: record["result"] for record in kept[1:]}
        # A line that was cut off as it was written goes: the next one would be appended to it.
        path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._known)

    def knows(self, *question: Any) -> bool:
        return _digest(question) in self._known

    def recall(self, answer: Callable[[], Any], *question: Any) -> Any:
        """The result of `question`, from the file or else from `answer()`, which is then written; both are plain JSON."""
        digest = _digest(question)
        if digest not in self._known:
            result = answer()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"question": digest, "result": result}) + "\n")
            self._known[digest] = result
        return self._known[digest]


def _digest(question: Any) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:24]


def _parsed(line: str) -> Any:
    """A line's record; None for one that was cut off."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
