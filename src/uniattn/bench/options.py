"""The command line's options that `bench`, `tune` and `explain` share: batches, their shape, and errors that name the option."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uniattn.bench import workloads
from uniattn.errors import ArgumentError


def shape(options: Namespace) -> dict[str, Any]:
    """The fields of `Workload` that options give."""
    match = re.fullmatch(r"(\d+)[/:](\d+)", options.heads)
    if match is None or not int(match[2]) or int(match[1]) % int(match[2]) or not int(match[1]):
        raise ArgumentError("--heads", options.heads, "query heads must be a multiple of KV heads", "write them as 32/8")
    return dict(
        num_q_heads=int(match[1]),
        num_kv_heads=int(match[2]),
        head_dim=options.head_dim,
        page_size=options.page_size,
        dtype=options.dtype,
        window=None if options.window is None else (options.window - 1, 0),
        softcap=options.softcap,
    )


def words(texts: Sequence[str]) -> list[str]:
    """The words of comma-separated lists. A text that is part of a row's name as it stands keeps its comma."""
    names = [w.name.lower() for w in workloads.table()]
    split = [[text] if any(text.lower() in name for name in names) else text.split(",") for text in texts]
    return [word.strip() for words in split for word in words if word.strip()]


def require_folder(option: str, path: Path | None) -> None:
    """Minutes of measuring must not end in a path that cannot be written."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ArgumentError(option, str(path), "its folder must exist", f"mkdir -p {path.parent}")


def or_argument_error(option: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """What `function` returns; what it finds wrong becomes an error of the option."""
    try:
        return function(*args, **kwargs)
    except OSError as error:
        # Its text repeats the path, which the message names already.
        limit = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ArgumentError(option, args[0], limit, "check the path") from error
    except ValueError as error:
        got = ", ".join(map(str, args[0])) if isinstance(args[0], list) else args[0]
        raise ArgumentError(option, got, str(error), "see uniattn bench --help and --list") from error
