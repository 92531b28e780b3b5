"""The launches, for the ops, which import them late: these need Triton."""

from uniattn.launch.attend import attend
from uniattn.launch.merge import merge
from uniattn.launch.plan import build
from uniattn.launch.write_kv import write_kv

__all__ = ["attend", "build", "merge", "write_kv"]
