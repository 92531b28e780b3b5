"""uniattn: one paged-attention operator for LLM inference that does not distinguish prefill from decode."""

from uniattn.attention import Plan, attention, merge_states, plan, write_kv
from uniattn.errors import ArgumentError, UniattnError, UnsupportedError

__all__ = ["ArgumentError", "Plan", "UniattnError", "UnsupportedError", "attention", "merge_states", "plan", "write_kv"]
