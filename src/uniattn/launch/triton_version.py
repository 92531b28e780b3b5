"""Is there a Triton that can compile the kernels? Asked by the launch path only: importing uniattn needs no Triton."""

import functools
import importlib
import re

from uniattn.errors import UnsupportedError

OLDEST = (3, 6)


@functools.cache
def require() -> None:
    """Raise `UnsupportedError` where Triton is missing or too old. A success is remembered, a failure is asked again."""
    check(installed())


def installed() -> str | None:
    """Version of the Triton that `import triton` finds, None where it finds none."""
    try:
        return importlib.import_module("triton").__version__
    except ImportError:
        return None


def check(version: str | None) -> None:
    """Raise unless `version` (None: not installed) is at least `OLDEST`."""
    limit = f"the kernels need Triton {OLDEST[0]}.{OLDEST[1]} or newer"
    fix = 'pip install "uniattn[triton]", or set UNIATTN_BACKEND=reference for the slow path'
    if version is None:
        raise UnsupportedError("triton", got="no importable package named triton", limit=limit, fix=fix)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < OLDEST:
        raise UnsupportedError("triton", got=f"Triton {version}", limit=limit, fix=fix)
