"""Compiling a model's kernels before its first batch."""

import torch

from uniattn.launch import backend, choice
from uniattn.launch.cache import num_compilations
from uniattn.launch.target import target_of
from uniattn.problem import validate_warmup
from uniattn.problem.layout import UNBOUNDED, window_bounds
from uniattn.schedule import hopper as hopper_tiles
from uniattn.tuning.choose import every


def warmup(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    page_size: int | None = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    causal: bool | None = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: torch.dtype | None = None,
    alibi_slopes: bool = False,
    seqlens_k: bool = True,
    cu_seqlens_k: bool = False,
    return_lse: bool = False,
    same_strides: bool | None = None,
) -> int:
    """Compile all that calls of `plan`, `attention` and `write_kv` with one layer's shapes and options can need.

    Afterwards no such call compiles anything, whatever the number of sequences and tokens, their lengths, the size of the window
    or the scale: those are numbers to the kernels. A model whose layers differ (some with a window, say) calls it once for each
    kind. Kernels that Triton's cache on disk holds are taken from there. What still compiles later: tensors whose address is not
    a multiple of 16 bytes, or odd strides (padded heads), and plans with tiles of the caller's own.

    Args:
        num_q_heads, num_kv_heads, head_dim: of q and the caches.
        v_head_dim: of V. None: `head_dim`.
        page_size: tokens a page; None for contiguous K/V.
        dtype: of q and the caches.
        device: where the tensors will be; on a CPU there is nothing to compile.
        causal: as in `attention`; None stands for a bool tensor.
        window, softcap: as in `attention`; only whether there is one matters.
        sinks: dtype of the sinks, None without.
        alibi_slopes, seqlens_k, cu_seqlens_k: whether `attention` is given that tensor.
        return_lse: whether `attention` is asked for the LSE.
        same_strides: whether K and V have equal strides, as two halves of one buffer or two buffers of one shape have. None: they
            do where the head dims are equal; else both cases are compiled.

    Returns:
        How many kernels were compiled or taken from Triton's cache on disk.

    Raises:
        ArgumentError: a size or dtype is wrong, such as head counts that do not divide.
        UnsupportedError: this version has no kernels for the sizes or dtype, there is no such GPU, or Triton is missing or too old.

    >>> import uniattn
    >>> uniattn.warmup(32, 8, 128, page_size=16, device="cpu")  # on a GPU: 20
    0
    """
    validate_warmup.shapes(num_q_heads, num_kv_heads, head_dim, v_head_dim, page_size)
    validate_warmup.dtypes(dtype, sinks)
    device = torch.device(device)
    validate_warmup.present(device)
    example = torch.empty(0, dtype=dtype, device=device)
    if backend.choose(example) == "reference":
        return 0
    from uniattn.launch import attend, merge, plan, write_kv

    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    before = num_compilations()
    index = example.get_device()
    group, paged = num_q_heads // num_kv_heads, page_size is not None
    int32 = torch.int32
    lengths = int32 if seqlens_k else None
    # `attention` makes the offsets of contiguous K/V itself where they are not given.
    offsets = int32 if cu_seqlens_k or not paged else None
    flags = torch.bool if causal is None else None
    window_left, _ = window_bounds(window)
    aligned_out = v_head_dim * dtype.itemsize % 16 == 0
    aligned = head_dim * dtype.itemsize % 16 == 0 and aligned_out
    likely = [True] if head_dim == v_head_dim else [True, False]
    target = target_of(example.device)
    cache = torch.empty(0, page_size or 1, num_kv_heads, head_dim, dtype=dtype, device="meta")
    values = torch.empty(0, page_size or 1, num_kv_heads, v_head_dim, dtype=dtype, device="meta")
    # What a batch whose caches are laid out as the Hopper kernel cannot read takes stays to be compiled when it comes.
    kernels = choice.in_order(
        paged and aligned and not alibi_slopes and choice.may_use_hopper(target) and hopper_tiles.readable(cache, values)
    )
    for t in every(head_dim, v_head_dim, dtype.itemsize, page_size or 0, window_left != UNBOUNDED, target, kernels):
        use_hopper = t.kernel == "hopper"
        l2_tokens = plan.l2_tokens(use_hopper, head_dim, v_head_dim, dtype.itemsize)
        for may_cut in (False, True):
            for chunk in plan.chunks(may_cut):
                plan.KERNELS[
                    plan.Key(
                        index, int32, lengths, offsets, flags, causal is True, group, paged, t.block_m, t.block_n, t.small_m,
                        t.small_n, t.heads_first, use_hopper, l2_tokens, may_cut, chunk,
                    )
                ]  # fmt: skip
            if use_hopper:
                from uniattn.launch import hopper

                hopper.KERNELS[
                    hopper.Key(
                        device=index, dtype=dtype, page_table=int32, causal_per_seq=flags, sinks=sinks, has_lse=return_lse,
                        has_partials=may_cut, causal=causal is True, has_window=window_left != UNBOUNDED, has_softcap=softcap > 0,
                        head_dim=head_dim, v_head_dim=v_head_dim, group=group, page_size=page_size or 0, block_n=t.block_n,
                        kv_stages=t.num_stages,
                    )
                ]  # fmt: skip
                continue
            for same in likely if same_strides is None else [same_strides]:
                attend.KERNELS[
                    attend.Key(
                        device=index, dtype=dtype, page_table=int32 if paged else None, cu_seqlens_k=None if paged else offsets,
                        causal_per_seq=flags, sinks=sinks, alibi=torch.float32 if alibi_slopes else None, has_lse=return_lse,
                        has_partials=may_cut, aligned=aligned, wide=False, same_strides=same, causal=causal is True,
                        has_window=window_left != UNBOUNDED, has_softcap=softcap > 0, head_dim=head_dim, v_head_dim=v_head_dim,
                        group=group, page_size=page_size or 0, tiles=t.compiled_in,
                    )
                ]  # fmt: skip
        if not use_hopper:
            for rows in merge.ROWS:
                merge.PIECES_KERNELS[
                    merge.PiecesKey(index, dtype, int32, return_lse, aligned_out, group, v_head_dim, t.block_m, rows)
                ]
    if page_size is not None:
        block = write_kv.block_elements(num_kv_heads, head_dim, v_head_dim)
        for slots in (torch.int32, torch.int64):
            write_kv.KERNELS[write_kv.Key(index, dtype, slots, aligned, head_dim, v_head_dim, page_size, block)]
    return num_compilations() - before
