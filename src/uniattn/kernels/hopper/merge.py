"""The pieces of a cut tile, merged inside the kernel by the consumer that finishes last: a second launch would cost 2 us and more.

Pieces are added in their own order whoever is last, so equal calls give equal bits. A tile's counter goes back to 0, so that the next
launch with the plan finds it so.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uniattn.kernels.hopper.compat import barrier
from uniattn.kernels.hopper.items import TILE_ROWS

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def is_last(counter_ptr, num_pieces):
    """Whether this consumer is the last of a tile's pieces to have stored its rows; after all its threads have."""
    barrier()
    before = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = before == num_pieces - 1
    if last:
        gl.store(counter_ptr, 0)
    return last


@gluon.jit
def merge_pieces(
    cfg, where, W: gl.constexpr, first_part, part_stride, num_pieces, partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr,
    out_token_stride, out_head_stride, num_tokens,
):  # fmt: skip
    """Write this consumer's rows of a tile from its pieces, which lie `part_stride` parts apart from `first_part` on."""
    dim = gl.arange(0, cfg.dv, gl.SliceLayout(0, cfg.merge))
    for first in range(0, gl.minimum(where.num_rows - where.first_row, cfg.rows), cfg.merge_rows):
        row = first + gl.arange(0, cfg.merge_rows, gl.SliceLayout(1, cfg.merge))
        r = where.first_row + row
        exists = r < where.num_rows
        total_max = gl.full([cfg.merge_rows], float("-inf"), gl.float32, gl.SliceLayout(1, cfg.merge))
        total = gl.zeros([cfg.merge_rows], gl.float32, gl.SliceLayout(1, cfg.merge))
        acc = gl.zeros([cfg.merge_rows, cfg.dv], gl.float32, cfg.merge)
        for piece in range(0, num_pieces, cfg.merge_pieces):
            lses = gl.tuple([])
            outs = gl.tuple([])
            new_max = total_max
            for i in gl.static_range(cfg.merge_pieces):
                part_row = (first_part + (piece + i) * part_stride).to(gl.int64) * TILE_ROWS + W * cfg.rows + row
                there = exists & (piece + i < num_pieces)
                lse = gl.load(partial_lse_ptr + part_row, mask=there, other=float("-inf"))
                out = gl.load(partial_out_ptr + part_row[:, None] * cfg.dv + dim[None, :], mask=there[:, None], other=0.0)
                lses += (lse,)
                outs += (out,)
                new_max = gl.maximum(new_max, lse)
            pivot = gl.where(new_max == float("-inf"), 0.0, new_max)
            correction = gl.exp2((total_max - pivot) * LOG2E)
            acc = acc * correction[:, None]
            total = total * correction
            for i in gl.static_range(cfg.merge_pieces):
                weight = gl.exp2((lses[i] - pivot) * LOG2E)
                total += weight
                acc += outs[i] * weight[:, None]
            total_max = new_max
        empty = total == 0.0
        safe = gl.where(empty, 1.0, total)
        acc = acc * (1.0 / safe)[:, None]
        head = where.kv_head * cfg.group + r % cfg.group
        token = where.q_begin + r // cfg.group
        offset = token.to(gl.int64) * out_token_stride + head.to(gl.int64) * out_head_stride
        mask = exists[:, None] & (dim < cfg.v_head_dim)[None, :]
        gl.store(out_ptr + offset[:, None] + dim[None, :], acc.to(cfg.dtype), mask=mask)
        if lse_ptr is not None:
            lse = gl.where(empty, float("-inf"), total_max + gl.log2(safe) * LN2)
            gl.store(lse_ptr + head.to(gl.int64) * num_tokens + token, lse, mask=exists)
