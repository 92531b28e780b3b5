"""What one binary of the Hopper kernel is made for, and every layout, derived from it in one place."""

from triton.experimental.gluon import language as gl

from uniattn.kernels.hopper.compat import aggregate, constexpr_function

# A consumer is one warpgroup, and a warpgroup's product has 64 rows.
CONSUMER_ROWS = 64
NUM_CONSUMERS = 2


@constexpr_function
def swizzle_bytes(dim, bits):
    """The widest swizzle that a row of `dim` elements fills."""
    return min(128, dim * bits // 8)


@aggregate
class Config:
    """Constants of a binary.

    Attributes:
        dtype: of q, K, V and the output.
        head_dim, v_head_dim: as stored; `d` and `dv` are those padded to a power of two, as in shared memory.
        block_n: KV tokens a block; `box` of them come by one TMA copy, `boxes` copies a block.
        page_size: KV tokens a page, a multiple of `box`.
        kv_stages, q_stages: blocks of K and of V, and tiles of Q, in shared memory.
        group: query heads a KV head. `causal`: every sequence is.
        has_window, has_softcap: features whose sizes are run-time numbers.
        q_warps: warps that load Q.
    """

    dtype: gl.constexpr
    head_dim: gl.constexpr
    v_head_dim: gl.constexpr
    d: gl.constexpr
    dv: gl.constexpr
    block_n: gl.constexpr
    box: gl.constexpr
    boxes: gl.constexpr
    page_size: gl.constexpr
    kv_stages: gl.constexpr
    q_stages: gl.constexpr
    group: gl.constexpr
    causal: gl.constexpr
    has_window: gl.constexpr
    has_softcap: gl.constexpr
    q_warps: gl.constexpr
    rows: gl.constexpr
    q_layout: gl.constexpr
    k_layout: gl.constexpr
    v_layout: gl.constexpr
    s_mma: gl.constexpr
    o_mma: gl.constexpr
    p_dot: gl.constexpr
    copy: gl.constexpr
    copy_v: gl.constexpr
    q_copy: gl.constexpr
    word: gl.constexpr
    words: gl.constexpr
    one_warp: gl.constexpr
    merge: gl.constexpr
    merge_rows: gl.constexpr
    merge_pieces: gl.constexpr

    @constexpr_function
    def __init__(
        self, dtype, head_dim, v_head_dim, d, dv, block_n, box, page_size, kv_stages, q_stages, group, causal, has_window,
        has_softcap, q_warps,
    ):  # fmt: skip
        bits = dtype.primitive_bitwidth
        warps = CONSUMER_ROWS // 16
        self.dtype = gl.constexpr(dtype)
        self.head_dim = gl.constexpr(head_dim)
        self.v_head_dim = gl.constexpr(v_head_dim)
        self.d = gl.constexpr(d)
        self.dv = gl.constexpr(dv)
        self.block_n = gl.constexpr(block_n)
        self.box = gl.constexpr(box)
        self.boxes = gl.constexpr(block_n // box)
        self.page_size = gl.constexpr(page_size)
        self.kv_stages = gl.constexpr(kv_stages)
        self.q_stages = gl.constexpr(q_stages)
        self.group = gl.constexpr(group)
        self.causal = gl.constexpr(causal)
        self.has_window = gl.constexpr(has_window)
        self.has_softcap = gl.constexpr(has_softcap)
        self.q_warps = gl.constexpr(q_warps)
        self.rows = gl.constexpr(CONSUMER_ROWS)
        self.q_layout = gl.constexpr(gl.NVMMASharedLayout(swizzle_bytes(d, bits), bits, rank=2))
        self.k_layout = gl.constexpr(gl.NVMMASharedLayout(swizzle_bytes(d, bits), bits, rank=2))
        self.v_layout = gl.constexpr(gl.NVMMASharedLayout(swizzle_bytes(dv, bits), bits, rank=2))
        self.s_mma = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_n, 16]))
        self.o_mma = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, min(dv, 256), 16]))
        self.p_dot = gl.constexpr(gl.DotOperandLayout(0, self.o_mma.value, k_width=2))
        self.copy_v = gl.constexpr(_row_copies(dv, warps))
        self.copy = gl.constexpr(_row_copies(d, warps))
        self.q_copy = gl.constexpr(_row_copies(d, q_warps))
        self.word = gl.constexpr(gl.BlockedLayout([1], [32], [q_warps], [0]))
        # A warp a row. Eight pieces at once, not 16: the code runs once an item, mostly out of a cold cache, and the longer one took
        # 3 to 5 us more (decode 1 x 512 and 1 x 8192).
        self.merge_pieces = gl.constexpr(8)
        self.merge_rows = gl.constexpr(warps)
        self.merge = gl.constexpr(gl.BlockedLayout([1, dv // 32], [1, 32], [warps, 1], [1, 0]))
        self.one_warp = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))
        self.words = gl.constexpr(gl.BlockedLayout([8], [32], [warps], [0]))


@constexpr_function
def _row_copies(dim, warps):
    """Rows of `dim` 16-bit elements, 16 bytes a thread."""
    threads = min(32, dim // 8)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [warps, 1], [1, 0])
