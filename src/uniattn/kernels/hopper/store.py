"""A consumer's results: normalised rows with their LSE to the output, or to the place of a cut tile's piece."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uniattn.kernels.hopper.compat import aggregate, barrier, constexpr_function
from uniattn.kernels.hopper.items import TILE_ROWS

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@aggregate
class Place:
    """Where a consumer's rows belong: rows `[first_row, num_rows)` of a sequence whose tokens start at `q_begin`.

    `takes_sink`: this piece is the one that counts the sink.
    """

    q_begin: gl.tensor
    num_rows: gl.tensor
    first_row: gl.tensor
    kv_head: gl.tensor
    takes_sink: gl.tensor

    @constexpr_function
    def __init__(self, q_begin, num_rows, first_row, kv_head, takes_sink):
        self.q_begin = q_begin
        self.num_rows = num_rows
        self.first_row = first_row
        self.kv_head = kv_head
        self.takes_sink = takes_sink


@gluon.jit
def _finish(cfg, place, acc, row_max, row_sum, sinks_ptr):
    """`(out, lse)`: with the sink, normalised; rows that see nothing give 0 and -inf. `row_max` in base 2, LSE natural."""
    row = place.first_row + gl.arange(0, cfg.rows, gl.SliceLayout(1, cfg.s_mma))
    if sinks_ptr is not None:
        takes = (row < place.num_rows) & place.takes_sink
        sink = gl.load(sinks_ptr + place.kv_head * cfg.group + row % cfg.group, mask=takes, other=float("-inf")).to(gl.float32)
        sink = sink * LOG2E
        new_max = gl.maximum(row_max, sink)
        pivot = gl.where(new_max == float("-inf"), 0.0, new_max)
        correction = gl.exp2(row_max - pivot)
        row_sum = row_sum * correction + gl.exp2(sink - pivot)
        row_max = new_max
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, cfg.o_mma))[:, None]
    empty = row_sum == 0.0
    safe = gl.where(empty, 1.0, row_sum)
    out = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, cfg.o_mma))[:, None]
    lse = gl.where(empty, float("-inf"), (row_max + gl.log2(safe)) * LN2)
    return out, lse


@gluon.jit
def store_tile(cfg, place, q_part, acc, row_max, row_sum, out_ptr, lse_ptr, sinks_ptr, out_token_stride, out_head_stride,
               num_tokens):  # fmt: skip
    """Write a whole tile's rows. They pass through the place of their Q, which nobody reads any more, to be written in long rows."""
    out, lse = _finish(cfg, place, acc, row_max, row_sum, sinks_ptr)
    if cfg.dv == cfg.d:
        q_part.store(out.to(cfg.dtype))
        barrier()
        out16 = q_part.load(cfg.copy_v)
    else:
        out16 = gl.convert_layout(out.to(cfg.dtype), cfg.copy_v)
    r = place.first_row + gl.arange(0, cfg.rows, gl.SliceLayout(1, cfg.copy_v))
    dim = gl.arange(0, cfg.dv, gl.SliceLayout(0, cfg.copy_v))
    head = place.kv_head * cfg.group + r % cfg.group
    offset = (place.q_begin + r // cfg.group).to(gl.int64) * out_token_stride + head.to(gl.int64) * out_head_stride
    exists = (r < place.num_rows)[:, None] & (dim < cfg.v_head_dim)[None, :]
    gl.store(out_ptr + offset[:, None] + dim[None, :], out16, mask=exists)
    if lse_ptr is not None:
        r = place.first_row + gl.arange(0, cfg.rows, gl.SliceLayout(1, cfg.s_mma))
        head = place.kv_head * cfg.group + r % cfg.group
        gl.store(lse_ptr + head.to(gl.int64) * num_tokens + place.q_begin + r // cfg.group, lse, mask=r < place.num_rows)


@gluon.jit
def store_partial(cfg, place, part, W: gl.constexpr, acc, row_max, row_sum, partial_out_ptr, partial_lse_ptr, sinks_ptr):
    """Write a piece's rows, in fp32, to its place in `[parts, 128, dv]` and `[parts, 128]`."""
    out, lse = _finish(cfg, place, acc, row_max, row_sum, sinks_ptr)
    base = part.to(gl.int64) * TILE_ROWS + W * cfg.rows
    r = gl.arange(0, cfg.rows, gl.SliceLayout(1, cfg.o_mma))
    dim = gl.arange(0, cfg.dv, gl.SliceLayout(0, cfg.o_mma))
    exists = (place.first_row + r < place.num_rows)[:, None] & (dim < cfg.dv)[None, :]
    gl.store(partial_out_ptr + (base + r)[:, None] * cfg.dv + dim[None, :], out, mask=exists)
    r = gl.arange(0, cfg.rows, gl.SliceLayout(1, cfg.s_mma))
    gl.store(partial_lse_ptr + base + r, lse, mask=place.first_row + r < place.num_rows)
