"""Launches that note their keys and run nothing, and random batches of one model."""

import random
from types import SimpleNamespace
from typing import Any

import torch

from uniattn.launch import attend, hopper, merge, plan, write_kv
from uniattn.launch import cache as cache_tools
from uniattn.launch.target import Target
from uniattn.problem.layout import window_bounds
from uniattn.testing import Batch

H200 = Target("NVIDIA H200", "cuda", 90, 132, 232448)
# The launches of each kernel: the module and the name of its `Kernels`.
KERNELS = {
    "attend": (attend, "KERNELS"),
    "hopper": (hopper, "KERNELS"),
    "plan": (plan, "KERNELS"),
    "pieces": (merge, "PIECES_KERNELS"),
    "merge": (merge, "KERNELS"),
    "write_kv": (write_kv, "KERNELS"),
}


class Recorder(dict):
    """Stands for a kernel's launches: `recorder[key](grid, pointers, numbers)` appends to `keys` and `launches`."""

    def __init__(self):
        super().__init__()
        self.keys_seen = []
        self.launches = []

    def __missing__(self, key):
        self.keys_seen.append(key)
        return lambda *launch: self.launches.append(launch)


def record(monkeypatch) -> SimpleNamespace:
    """Replace the launches of all kernels by recorders, on a chip like an H200."""
    recorders = {name: Recorder() for name in KERNELS}
    for name, (module, attribute) in KERNELS.items():
        monkeypatch.setattr(module, attribute, recorders[name])
    monkeypatch.setattr(attend, "target_of", lambda device: H200)
    monkeypatch.setattr("uniattn.launch.tensor_map.of_cache", lambda cache, *box: (0,) * len(cache_tools.MAP_TYPES))
    return SimpleNamespace(**recorders)


def call(batch, plan_spec=None, plan_buffer=None, **changes):
    """`launch.attend` of a batch, as the front door calls it."""
    kwargs = batch.kwargs(**changes)
    q, v_cache = kwargs["q"], kwargs["v_cache"]
    causal, window = kwargs.get("causal", True), kwargs.get("window")
    out = kwargs.get("out")
    if out is None:
        out = q.new_empty((*q.shape[:2], v_cache.shape[-1]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if kwargs.get("return_lse") else None
    attend.attend(
        q, kwargs["k_cache"], v_cache, kwargs["cu_seqlens_q"], kwargs["seqlens_k"], kwargs["page_table"], kwargs["cu_seqlens_k"],
        kwargs.get("max_seqlen_q", q.shape[0]), kwargs.get("softmax_scale", 0.125), causal is True,
        causal if isinstance(causal, torch.Tensor) else None, *window_bounds(window), kwargs.get("softcap", 0.0),
        kwargs.get("sinks"), kwargs.get("alibi_slopes"), plan_spec, plan_buffer, out, lse,
    )  # fmt: skip


def random_batch(
    rng: random.Random, num_q_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None, page_size: int | None = 16,
    dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> Batch:  # fmt: skip
    """Tensors without memory (on "meta"), shaped like a batch of an engine: any number of sequences, tokens and pages."""

    def tensor(*shape, kind=dtype):
        return torch.empty(shape, dtype=kind, device="meta")

    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    num_seqs = rng.choice([1, 1, 2, 15, 16, 17, 64, rng.randint(1, 300)])
    num_tokens = rng.choice([1, num_seqs, num_seqs, 16 * num_seqs, rng.randint(1, 20000)])
    shape = (rng.choice([1, 16, rng.randint(1, 10000)]), *([page_size] if page_size else []), num_kv_heads)
    int32 = torch.int32
    return Batch(
        lengths=(),
        q=tensor(num_tokens, num_q_heads, head_dim),
        k_cache=tensor(*shape, head_dim),
        v_cache=tensor(*shape, v_head_dim),
        cu_seqlens_q=tensor(num_seqs + 1, kind=int32),
        seqlens_k=tensor(num_seqs, kind=int32) if page_size else None,
        page_table=tensor(num_seqs, rng.choice([1, 16, rng.randint(1, 5000)]), kind=int32) if page_size else None,
        cu_seqlens_k=None if page_size else tensor(num_seqs + 1, kind=int32),
        options={"max_seqlen_q": rng.choice([1, 16, 4096]), **options},
    )
