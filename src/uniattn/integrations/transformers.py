"""uniattn as an attention of Hugging Face transformers' continuous batching engine.

    import uniattn.integrations.transformers as uniattn_transformers

    uniattn_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="paged|uniattn")
    outputs = model.generate_batch(list_of_token_lists, ...)

The engine packs the new tokens of all its requests into one row and hands each layer `cu_seq_lens_q`, `cu_seq_lens_k` and,
for each group of layers, `write_index` (the cache slot of every new token) and `read_index` (the slot of every KV token). A
slot is a row of the flat cache `[num_slots, num_kv_heads, head_dim]`; `block_size` consecutive slots are a block, which the
engine hands out whole. There are two kinds of layer:

- **full attention**: slots follow the tokens, block by block. New K/V are written first; then the queries read the cache
  through a page table, of which `read_index` holds one entry in each `block_size`-th place. Nothing is gathered.
- **sliding window**: a request owns a ring of `window` slots, so a chunk of new tokens may overwrite old ones that its own
  first queries still see. The queries read first: the old K/V are gathered and the new ones laid behind them. A step of
  decodes alone gathers nothing: one new token only ever replaces the one that has just left the window, so it is written
  first and the ring is read through a page table with pages of one slot.

Nothing here reads a device value on the host, so that the engine may capture a step in a CUDA graph; the engine's padding
(plateaus in the cumulative lengths, slots in its trash blocks) is what `uniattn.attention` takes as it is.
"""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from uniattn.attention import attention, write_kv
from uniattn.errors import UnsupportedError

NAME = "paged|uniattn"


def register() -> str:
    """Make `attn_implementation="paged|uniattn"` known to transformers, and return that name. Calling it again changes nothing.

    Raises:
        UnsupportedError: transformers is missing or has no continuous batching for registered attentions.
    """
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise UnsupportedError(
            "transformers",
            got=f"an import that fails ({error})",
            limit="its continuous batching engine is needed, version 5.17",
            fix="pip install 'uniattn[transformers]'",
        ) from error
    # An engine that calls registered attentions has registered its own so; newer ones call built-in attentions only.
    if "paged|sdpa" not in AttentionInterface():
        raise UnsupportedError(
            "transformers",
            got=f"version {version('transformers')}",
            limit="its continuous batching engine has no place for a registered attention; version 5.17 has",
            fix="pip install 'uniattn[transformers]'",
        )
    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **engine: Any,
) -> tuple[Tensor, None]:
    """Write one layer's new K/V into the engine's cache and attend, for every request of the step at once.

    Args:
        module: the attention layer; `layer_idx` says which.
        query: `[1, num_q_heads, num_tokens, head_dim]`, rotary embedding applied.
        key, value: `[1, num_kv_heads, num_tokens, dim]`, the new tokens' only.
        attention_mask: unused; what a query sees follows from the lengths and the layer's window.
        scaling: what the scores are multiplied by; None means `head_dim ** -0.5`.
        softcap: the scores' cap (Gemma 2), or None.
        s_aux: attention sinks `[num_q_heads]` (gpt-oss), or None.
        **engine: what the engine passes to every layer, and options of the model that attention has no use for.

    Returns:
        `[1, num_tokens, num_q_heads, value_dim]`, and None for the attention weights.

    Raises:
        UnsupportedError: called outside the continuous batching engine.
    """
    cache: Any = engine.get("cache")
    missing = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index") if engine.get(name) is None]
    if not hasattr(cache, "layer_index_to_group_indices") or missing:
        raise UnsupportedError(
            NAME,
            got="a call without the arguments of the continuous batching engine",
            limit=f"{NAME} runs inside generate_batch() or a continuous batching manager only",
            fix="call model.generate_batch(...), or load the model with another attn_implementation for forward() and generate()",
        )
    if engine.get("block_table") is not None:
        raise UnsupportedError(
            NAME,
            got="a block table",
            limit="decode steps come with read_index and write_index here",
            fix="leave max_blocks_per_request unset in ContinuousBatchingConfig",
        )
    group, layer_in_group = cache.layer_index_to_group_indices[module.layer_idx]
    step = _step_of(cache, group, layer_in_group, cache.sliding_windows[module.layer_idx], engine)
    queries, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # The cache is as wide as the keys; narrower values use the front of each row.
    k_slots, v_slots = cache.key_cache[layer_in_group], cache.value_cache[layer_in_group][..., : v.shape[-1]]
    options: dict[str, Any] = {
        "cu_seqlens_q": engine["cu_seq_lens_q"],
        "cu_seqlens_k": step.cu_seqlens_k,
        "max_seqlen_q": engine["max_seqlen_q"],
        "max_seqlen_k": step.max_seqlen_k,
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "window": step.window,
    }
    out: Any
    if step.page_table is not None:
        k_pages, v_pages = (x.unflatten(0, (-1, step.page_size)) for x in (k_slots, v_slots))
        write_kv(k, v, k_pages, v_pages, step.write_index)
        out = attention(queries, k_pages, v_pages, page_table=step.page_table, **options)
    else:
        k_all, v_all = k, v
        if step.old_slots is not None:
            k_all, v_all = (
                slots.index_select(0, step.old_slots).index_copy_(0, step.rows_of_new, new) for slots, new in ((k_slots, k), (v_slots, v))
            )
        out = attention(queries, k_all, v_all, **options)
        write_kv(k, v, k_slots.unsqueeze(1), v_slots.unsqueeze(1), step.write_index)
    return out.unsqueeze(0), None


@dataclass(frozen=True)
class _Step:
    """How the queries of one step reach their keys in one group of layers.

    Either `page_table` is set (write, then read the cache through it) or it is None (read, then write): then the keys are the
    new ones alone where `old_slots` is None, and otherwise the rows gathered from `old_slots` with the new ones laid over
    `rows_of_new`.
    """

    cu_seqlens_k: Tensor  # int32 [num_seqs + 1]
    max_seqlen_k: int
    window: tuple[int, int] | None
    write_index: Tensor  # int64 [num_tokens], slots
    page_table: Tensor | None = None  # int32 [num_seqs, max_pages]
    page_size: int = 1
    old_slots: Tensor | None = None  # int64 [num_rows], slots; places of new tokens hold the engine's sentinel slot
    rows_of_new: Tensor | None = None  # int64 [num_tokens], rows of the gathered K/V


# The layers of a group share their step, which takes some ten small launches to build. The first layer of a group always
# builds it afresh, since a captured CUDA graph must hold the launches that built what it uses, and the engine runs the
# warm-up and the capture with the same tensors. Holding the step's own `read_index` makes the identity test below safe: it
# cannot be freed and its id reused.
_last_steps: WeakKeyDictionary[Any, dict[int, tuple[Tensor, _Step]]] = WeakKeyDictionary()


def _step_of(cache: Any, group: int, layer_in_group: int, window: int, engine: dict[str, Any]) -> _Step:
    """The step of a layer's group: the one that the group's first layer built, where that was for this very step."""
    if torch.compiler.is_compiling():  # the compiler merges equal subexpressions by itself and knows no weak dictionaries
        return _build_step(cache, group, window, engine)
    steps = _last_steps.setdefault(cache, {})
    read_index = engine["read_index"][group]
    if layer_in_group > 0 and group in steps and steps[group][0] is read_index:
        return steps[group][1]
    step = _build_step(cache, group, window, engine)
    steps[group] = (read_index, step)
    return step


def _build_step(cache: Any, group: int, window: int, engine: dict[str, Any]) -> _Step:
    """Build the step of a group whose layers see `window` tokens, the query's own included; the engine writes 1 for no window."""
    is_full = window == 1
    cu_seqlens_k, max_seqlen_k = engine["cu_seq_lens_k"], engine["max_seqlen_k"]
    if isinstance(cu_seqlens_k, dict):
        layer_type = "full_attention" if is_full else "sliding_attention"
        cu_seqlens_k, max_seqlen_k = cu_seqlens_k[layer_type], max_seqlen_k[layer_type]
    read_index, write_index = engine["read_index"][group], engine["write_index"][group]
    # The engine leaves read_index empty where every request of the step is new: then the new tokens are all there is to read.
    has_old = read_index.numel() > 0
    if is_full:
        slots = read_index if has_old else write_index
        page_size = cache.block_size
        page_table = (_every(slots, cu_seqlens_k, page_size, max_seqlen_k) // page_size).int()
        return _Step(cu_seqlens_k, max_seqlen_k, None, write_index, page_table, page_size)
    closed_window = (window - 1, 0)
    if not has_old:
        return _Step(cu_seqlens_k, max_seqlen_k, closed_window, write_index)
    cu_seqlens_q = engine["cu_seq_lens_q"]
    if engine["max_seqlen_q"] == 1 and write_index.numel() == cu_seqlens_q.numel() - 1:
        slots = _every(read_index, cu_seqlens_k, 1, max_seqlen_k)
        page_table = torch.where(slots == cache.sentinel_index, write_index[:, None], slots).int()
        return _Step(cu_seqlens_k, max_seqlen_k, closed_window, write_index, page_table)
    # A sequence's new tokens are its last KV rows, so a token's row is its place in the batch plus the old rows up to its
    # sequence's end. Padding tokens fall behind all sequences, on rows that no sequence reads.
    tokens = torch.arange(write_index.numel(), device=write_index.device)
    ends = torch.searchsorted(cu_seqlens_q, tokens, right=True).clamp_(max=cu_seqlens_q.numel() - 1)
    rows_of_new = tokens + (cu_seqlens_k - cu_seqlens_q)[ends]
    return _Step(cu_seqlens_k, max_seqlen_k, closed_window, write_index, old_slots=read_index, rows_of_new=rows_of_new)


def _every(slots: Tensor, cu_seqlens_k: Tensor, stride: int, max_seqlen_k: int) -> Tensor:
    """The slot of every `stride`-th KV token of each sequence: `[num_seqs, ceil(max_seqlen_k / stride)]`, valid slots throughout.

    Places past a sequence's end hold whatever follows it in `slots`, which the kernels leave unread.
    """
    steps = torch.arange(0, max(max_seqlen_k, 1), stride, device=slots.device)
    places = cu_seqlens_k[:-1, None] + steps
    return slots[places.clamp_(max=slots.numel() - 1)]


__all__ = ["NAME", "attend", "register"]
