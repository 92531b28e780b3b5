"""uniattn: one paged-attention operator for LLM inference that does not distinguish prefill from decode."""

from uniattn.attention import Plan, attention, merge_states, plan, write_kv
from uniattn.errors import ArgumentError, UniattnError, UnsupportedError
from uniattn.launch.warmup import warmup
from uniattn.problem.check_values import check_values

__all__ = [
    "ArgumentError",
    "Plan",
    "UniattnError",
    "UnsupportedError",
    "attention",
    "check_values",
    "merge_states",
    "plan",
    "warmup",
    "write_kv",
]
