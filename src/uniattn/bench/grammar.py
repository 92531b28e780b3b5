"""Batches in vLLM's benchmark grammar: `2q1k_32q1s1k` is two prefills of 1024 tokens and 32 decodes over 1024.

Segments are joined by `_`. A segment is `<count>q<query tokens>s<KV tokens>`; the count defaults to 1, the KV tokens to the query
tokens, and a `k` after a number multiplies it by 1024. Commas part batches.
"""

import re

from uniattn.bench.workloads import Lengths, Workload

_SEGMENT = re.compile(r"(?P<count>\d+)?q(?P<q>\d+)(?P<qk>k)?(?:s(?P<s>\d+)(?P<sk>k)?)?")


def parse(text: str) -> Lengths:
    """The lengths of one batch.

    >>> parse("2q1k_q1s3")
    ((1024, 1024), (1024, 1024), (1, 3))
    """
    lengths: list[tuple[int, int]] = []
    for segment in text.strip().split("_"):
        match = _SEGMENT.fullmatch(segment)
        if match is None:
            raise ValueError(f"{segment!r} in {text!r} is not <count>q<tokens>[k]s<tokens>[k], as in 32q1s1k")
        q_len = int(match["q"]) * (1024 if match["qk"] else 1)
        kv_len = q_len if match["s"] is None else int(match["s"]) * (1024 if match["sk"] else 1)
        count = int(match["count"] or 1)
        if count < 1 or not 1 <= q_len <= kv_len:
            raise ValueError(f"{segment!r} in {text!r} needs a count of at least 1 and 1 <= query tokens <= KV tokens")
        lengths += [(q_len, kv_len)] * count
    return tuple(lengths)


def workloads(text: str, **shape: object) -> list[Workload]:
    """The batches of a comma list, named by their own text; `shape` holds other fields of `Workload`."""
    return [Workload(word.strip(), "batch", parse(word), **shape) for word in text.split(",")]  # type: ignore[arg-type]
