"""uniattn: one paged-attention operator for LLM inference that does not distinguish prefill from decode."""

from uniattn.attention import attention, merge_states, write_kv
from uniattn.errors import ArgumentError, UniattnError, UnsupportedError

__all__ = ["ArgumentError", "UniattnError", "UnsupportedError", "attention", "merge_states", "write_kv"]
