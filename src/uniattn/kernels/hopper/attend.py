"""The Hopper kernel: persistent and warp-specialised, every kind of item in one launch.

A program takes one SM for the whole launch: two warpgroups compute, a warp brings K, one V, and two bring Q. Everything between them
goes through rings in shared memory (`channel`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from uniattn.kernels.hopper.channel import make_ring
from uniattn.kernels.hopper.compute import consume
from uniattn.kernels.hopper.config import Config
from uniattn.kernels.hopper.items import load_record
from uniattn.kernels.hopper.load import load_blocks, load_queries


@gluon.jit(
    do_not_specialize=[
        "first_counter", "num_pages", "kv_capacity", "num_tokens", "num_seqs", "num_kv_heads", "window_left", "window_right",
    ]
)  # fmt: skip
def attend_kernel(
    q_ptr, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, items_ptr, page_table_ptr, causal_ptr, sinks_ptr, k_desc, v_desc,
    q_strides, out_strides, page_table_stride, first_counter, num_pages, kv_capacity, num_tokens, num_seqs, num_kv_heads,
    window_left, window_right, scale, softcap,
    CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, V_HEAD_DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
    KV_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, Q_WARPS: gl.constexpr, CONSUMER_REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """Grid: as many programs as there are SMs, or fewer where the plan holds fewer items; a program finds its own in the plan.

    `k_desc`, `v_desc`: TMA descriptors of the caches as `[pages, kv_heads, slots, dim]` with boxes `[1, 1, BOX, D or DV]`. Strides in
    elements: token, head. `first_counter`: where the plan's counters start, an int for each partial slot, head and consumer, 0. Pieces
    of cut tiles go to `partial_out_ptr` and `partial_lse_ptr` and are merged by the last of them. The rest as `kernels.triton.attend`.
    """
    cfg = Config(
        q_ptr.dtype.element_ty, HEAD_DIM, V_HEAD_DIM, D, DV, BLOCK_N, BOX, PAGE_SIZE, KV_STAGES, Q_STAGES, GROUP, CAUSAL, HAS_WINDOW,
        HAS_SOFTCAP, Q_WARPS,
    )  # fmt: skip
    # Q is full when every thread of its loaders has arrived.
    q_ring = make_ring(cfg.dtype, [cfg.q_stages * 2, cfg.rows, cfg.d], cfg.q_layout, cfg.q_stages, 32 * cfg.q_warps, 2)
    k_ring = make_ring(cfg.dtype, [cfg.kv_stages, cfg.block_n, cfg.d], cfg.k_layout, cfg.kv_stages, 1, 2)
    v_ring = make_ring(cfg.dtype, [cfg.kv_stages, cfg.block_n, cfg.dv], cfg.v_layout, cfg.kv_stages, 1, 2)
    # Four records: short items are loaded while those before them are computed.
    record_ring = make_ring(gl.int32, [4, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]), 4, 1, 4)
    wanted = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(wanted, count=1)
    fence_async_shared()
    num_records = (gl.load(items_ptr) + gl.load(items_ptr + 1)) * num_kv_heads
    record = load_record(items_ptr, gl.program_id(0), num_records)
    taken_ptr = items_ptr + 2
    counters_ptr = items_ptr + first_counter
    gl.warp_specialize(
        [
            (consume, (0, cfg, record_ring, q_ring, k_ring, v_ring, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, counters_ptr,
                       causal_ptr, sinks_ptr, out_strides[0], out_strides[1], num_tokens, num_seqs, num_kv_heads, kv_capacity,
                       window_left, window_right, scale, softcap)),
            (consume, (1, cfg, record_ring, q_ring, k_ring, v_ring, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, counters_ptr,
                       causal_ptr, sinks_ptr, out_strides[0], out_strides[1], num_tokens, num_seqs, num_kv_heads, kv_capacity,
                       window_left, window_right, scale, softcap)),
            (load_blocks, (cfg, record, record_ring, wanted, k_desc, k_ring, page_table_ptr, page_table_stride, causal_ptr, num_pages,
                           num_seqs, kv_capacity, window_left, window_right, True)),
            (load_blocks, (cfg, record, record_ring, wanted, v_desc, v_ring, page_table_ptr, page_table_stride, causal_ptr, num_pages,
                           num_seqs, kv_capacity, window_left, window_right, False)),
            (load_queries, (cfg, record, items_ptr, taken_ptr, num_records, wanted, q_ring, record_ring, q_ptr, q_strides[0],
                            q_strides[1])),
        ],
        [4, 1, 1, Q_WARPS],
        [CONSUMER_REGS, LOADER_REGS, LOADER_REGS, LOADER_REGS],
    )  # fmt: skip
