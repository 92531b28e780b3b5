"""The computing role: a warpgroup's 64 rows of every item. Two run side by side, each with half of a tile.

A block goes: issue the product of Q with its K, issue the product of the block before's P with its V, then the block's softmax while
the second runs. The two warpgroups take turns at issuing (ping-pong), so that one's softmax hides under the other's products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from uniattn.kernels.blocks import bounds
from uniattn.kernels.hopper.compat import aggregate, barrier, constexpr_function, from_triton
from uniattn.kernels.hopper.items import make_item, read_record
from uniattn.kernels.hopper.merge import is_last, merge_pieces
from uniattn.kernels.hopper.store import Place, store_partial, store_tile

tile_range = from_triton(bounds.tile_range)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _take_turn(W: gl.constexpr, both):
    """Wait until the other consumer has issued its products; nothing where it has no rows in this item."""
    if W == 0:
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p bar.sync 13, 256; mov.b32 $0, $1; }", "=r,r", [both], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p bar.sync 14, 256; mov.b32 $0, $1; }", "=r,r", [both], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _give_turn(W: gl.constexpr, both):
    """Let the other consumer issue its products."""
    if W == 1:
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p bar.arrive 13, 256; mov.b32 $0, $1; }", "=r,r", [both], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p bar.arrive 14, 256; mov.b32 $0, $1; }", "=r,r", [both], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _as_operand(cfg, p):
    """P in the 16-bit type and the layout of a product's left operand, in registers.

    By volatile assembly: LLVM would move a plain conversion below the next product's issue, which keeps 64 more registers alive.
    """
    if cfg.dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.bfloat16, is_pure=False, pack=2)
    else:
        p = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=False, pack=2)
    return gl.convert_layout(p, cfg.p_dot)


@gluon.jit
def _issue_scores(cfg, q, k_ring, slot):
    """Start Q K^T of a block: raw products `[rows, block_n]`, fp32."""
    k = k_ring.buffers.index(k_ring.stage(slot)).permute([1, 0])
    zero = gl.zeros([cfg.rows, cfg.block_n], gl.float32, cfg.s_mma)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _modify(cfg, products, scale, softcap, block, first_kv, last_kv, MASKED: gl.constexpr):
    """Softcap, then -inf where a row does not see a token: it sees `[first_kv, last_kv]`."""
    if cfg.has_softcap:
        # tanh(x) = 1 - 2 / (e^2x + 1). The approximate reciprocal errs by 1e-7 of itself; tanh.approx by 5e-4, or 2% of a probability
        # under a softcap of 50.
        grown = gl.exp2(products * (scale * 2.885390081777927)) + 1.0
        inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [grown], dtype=gl.float32, is_pure=True, pack=1)
        products = softcap - (2.0 * softcap) * inverse
    if MASKED:
        kv = block * cfg.block_n + gl.arange(0, cfg.block_n, gl.SliceLayout(0, cfg.s_mma))
        seen = kv[None, :] <= last_kv[:, None]
        if cfg.has_window:
            seen = seen & (kv[None, :] >= first_kv[:, None])
        products = gl.where(seen, products, float("-inf"))
    return products


@gluon.jit
def _pivot(row_max):
    return gl.where(row_max == float("-inf"), 0.0, row_max)


@gluon.jit
def _sums(cfg, p):
    """Each row's sum in eight parts, `[rows, 8]`: what a thread holds of a row it adds up itself, and threads meet once an item."""
    return gl.sum(gl.reshape(p, [cfg.rows, cfg.block_n // 8, 8]), 1)


@gluon.jit
def _step(
    W: gl.constexpr, MASKED: gl.constexpr, cfg, rows, slot, block, acc, p, row_max, row_sum, q, k_ring, v_ring
):
    """One block: its scores and softmax, and the product of the block before's P (`p`) with its V."""
    p16 = _as_operand(cfg, p)
    k_ring.wait_full(slot)
    _take_turn(W, rows.both)
    scores = _issue_scores(cfg, q, k_ring, slot)
    v_ring.wait_full(slot - 1)
    acc_next = warpgroup_mma(p16, v_ring.buffers.index(v_ring.stage(slot - 1)), acc, is_async=True)
    _give_turn(W, rows.both)
    products = warpgroup_mma_wait(1, deps=[scores])
    k_ring.release(slot)
    products = _modify(cfg, products, rows.scale, rows.softcap, block, rows.first_kv, rows.last_kv, MASKED)
    new_max = gl.maximum(row_max, gl.max(products, 1))
    pivot = _pivot(new_max)
    p = gl.exp2(products * rows.unit - (pivot * rows.unit)[:, None])
    correction = gl.exp2((row_max - pivot) * rows.unit)
    sums = _sums(cfg, p)
    row_sum = row_sum * gl.convert_layout(correction, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    v_ring.release(slot - 1)
    acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, cfg.o_mma))[:, None]
    return acc, p, new_max, row_sum


@gluon.jit
def _clear(cfg, v_ring, slot, first, last):
    """Zero the rows of a block of V outside `[first, last)`, as far as their boxes were brought: no query sees them, they may hold
    NaN, and 0 x NaN is NaN. Both consumers write the same."""
    ROWS: gl.constexpr = 16
    v_ring.wait_full(slot)
    buffer = v_ring.buffers.index(v_ring.stage(slot))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, cfg.copy_v))
    for i in gl.static_range(cfg.block_n // ROWS):
        outside_left = (i * ROWS < first) & (i * ROWS + ROWS > first // cfg.box * cfg.box)
        outside_right = (i * ROWS + ROWS > last) & (i * ROWS < (last + cfg.box - 1) // cfg.box * cfg.box)
        if outside_left | outside_right:
            part = buffer.slice(i * ROWS, ROWS)
            seen = (i * ROWS + row >= first) & (i * ROWS + row < last)
            part.store(gl.where(seen[:, None], part.load(cfg.copy_v), 0.0))
    fence_async_shared()
    barrier()


@aggregate
class Rows:
    """What a consumer's rows of an item share: the tokens each sees, `[first_kv, last_kv]`, and how products become scores.

    `unit` turns a score into base 2: softmax_scale * log2(e), or 1 under a softcap, which is applied in base 2.
    """

    first_kv: gl.tensor
    last_kv: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    unit: gl.tensor
    both: gl.tensor

    @constexpr_function
    def __init__(self, first_kv, last_kv, scale, softcap, unit, both):
        self.first_kv = first_kv
        self.last_kv = last_kv
        self.scale = scale
        self.softcap = softcap
        self.unit = unit
        self.both = both


@gluon.jit
def consume(
    W: gl.constexpr, cfg, record_ring, q_ring, k_ring, v_ring, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr,
    counters_ptr, causal_ptr, sinks_ptr, out_token_stride, out_head_stride, num_tokens, num_seqs, num_kv_heads, kv_capacity,
    window_left, window_right, scale, softcap,
):  # fmt: skip
    """Role of consumer W: rows `[64 W, 64 W + 64)` of each of the program's tiles."""
    row = gl.arange(0, cfg.rows, gl.SliceLayout(1, cfg.s_mma))
    turn = 0
    slot = 0
    if W == 1:
        _give_turn(W, gl.to_tensor(1))
    unit = scale
    if cfg.has_softcap:
        unit = scale * 0.0 + 1.0
    record_ring.wait_full(0)
    _, _, _, _, _, pieces, _, _ = read_record(record_ring, 0, cfg.words)
    while pieces != 0:
        seq, tile_row, _, q_len, kv_len, piece, _, kv_head = read_record(record_ring, turn, cfg.words)
        item = make_item(
            cfg, seq, tile_row, q_len, kv_len, piece, kv_head, causal_ptr, num_seqs, kv_capacity, window_left, window_right
        )
        num_rows = item.q_len * cfg.group
        first_row = tile_row + W * cfg.rows
        first_block = item.first_block
        last_block = item.last_block
        num_blocks = last_block - first_block + 1
        if first_row < num_rows:
            both = (tile_row + cfg.rows < num_rows).to(gl.int32)
            token = (first_row + row) // cfg.group
            pos = item.kv_len - item.q_len + token
            last_kv = gl.minimum(pos + item.right, item.readable - 1)
            rows = Rows(pos - window_left, last_kv, scale, softcap, unit, both)
            _, full_begin, full_end, _ = tile_range(
                item.kv_len, item.q_len, first_row, window_left, item.right, item.readable, cfg.group, cfg.rows
            )
            # Blocks in [bulk, edge) are seen whole by all rows.
            edge = gl.minimum(gl.maximum(full_end // cfg.block_n, first_block), last_block)
            bulk = first_block
            if cfg.has_window:
                bulk = gl.minimum(gl.maximum((full_begin + cfg.block_n - 1) // cfg.block_n, first_block), edge)
            q_ring.wait_full(turn)
            # Q was written by threads, and the products read it past their caches.
            fence_async_shared()
            q_part = q_ring.buffers.index(q_ring.stage(turn) * 2 + W)

            k_ring.wait_full(slot)
            _take_turn(W, both)
            scores = _issue_scores(cfg, q_part, k_ring, slot)
            _give_turn(W, both)
            products = warpgroup_mma_wait(0, deps=[scores])
            k_ring.release(slot)
            products = _modify(cfg, products, scale, softcap, last_block, rows.first_kv, last_kv, True)
            row_max = gl.max(products, 1)
            pivot = _pivot(row_max)
            prob = gl.exp2(products * unit - (pivot * unit)[:, None])
            row_sum = _sums(cfg, prob)
            acc = gl.zeros([cfg.rows, cfg.dv], gl.float32, cfg.o_mma)
            tail = item.readable - last_block * cfg.block_n
            if (tail > 0) & (tail < cfg.block_n) & (tail % cfg.box != 0):
                _clear(cfg, v_ring, slot, 0, tail)
            slot += 1
            for i in range(last_block - edge):
                acc, prob, row_max, row_sum = _step(
                    W, True, cfg, rows, slot, last_block - 1 - i, acc, prob, row_max, row_sum, q_part, k_ring, v_ring
                )
                slot += 1
            for _ in range(edge - bulk):
                acc, prob, row_max, row_sum = _step(W, False, cfg, rows, slot, 0, acc, prob, row_max, row_sum, q_part, k_ring, v_ring)
                slot += 1
            if cfg.has_window:
                for i in range(bulk - first_block):
                    acc, prob, row_max, row_sum = _step(
                        W, True, cfg, rows, slot, bulk - 1 - i, acc, prob, row_max, row_sum, q_part, k_ring, v_ring
                    )
                    slot += 1
                # The first token that any query of the sequence sees; what is before it may hold NaN.
                _, _, _, q_len, kv_len, _, _, _ = read_record(record_ring, turn, cfg.words)
                head = gl.maximum(kv_len - q_len - window_left, 0) - first_block * cfg.block_n
                if (head > 0) & (head < cfg.block_n) & (head % cfg.box != 0):
                    _clear(cfg, v_ring, slot - 1, head, cfg.block_n)
            p16 = _as_operand(cfg, prob)
            v_ring.wait_full(slot - 1)
            acc_next = warpgroup_mma(p16, v_ring.buffers.index(v_ring.stage(slot - 1)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_next])
            v_ring.release(slot - 1)
            row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, cfg.s_mma))
            seq, tile_row, q_begin, q_len, _, piece, partial, kv_head = read_record(record_ring, turn, cfg.words)
            first_row = tile_row + W * cfg.rows
            takes_sink = ((piece & 0xFFFF) == 0) & (seq != num_seqs)
            where = Place(q_begin, q_len * cfg.group, first_row, kv_head, takes_sink)
            # A run-time test with stores on a side that the constants rule out aborts the compiler (Triton 3.6): constants first.
            if partial_out_ptr is not None:
                if partial >= 0:
                    first_part = partial * num_kv_heads + kv_head
                    part = first_part + (piece & 0xFFFF) * num_kv_heads
                    store_partial(cfg, where, part, W, acc, row_max * unit, row_sum, partial_out_ptr, partial_lse_ptr, sinks_ptr)
                    if is_last(counters_ptr + first_part * 2 + W, piece >> 16):
                        merge_pieces(
                            cfg, where, W, first_part, num_kv_heads, piece >> 16, partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr,
                            out_token_stride, out_head_stride, num_tokens,
                        )  # fmt: skip
                else:
                    store_tile(
                        cfg, where, q_part, acc, row_max * unit, row_sum, out_ptr, lse_ptr, sinks_ptr, out_token_stride, out_head_stride,
                        num_tokens,
                    )  # fmt: skip
            else:
                store_tile(
                    cfg, where, q_part, acc, row_max * unit, row_sum, out_ptr, lse_ptr, sinks_ptr, out_token_stride, out_head_stride,
                    num_tokens,
                )  # fmt: skip
        else:
            # No rows in this item: let its blocks pass.
            for _ in range(num_blocks):
                k_ring.wait_full(slot)
                k_ring.release(slot)
                v_ring.wait_full(slot)
                v_ring.release(slot)
                slot += 1
            q_ring.wait_full(turn)
        q_ring.release(turn)
        record_ring.release(turn)
        turn += 1
        record_ring.wait_full(turn)
        _, _, _, _, _, pieces, _, _ = read_record(record_ring, turn, cfg.words)
