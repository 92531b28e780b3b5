"""Which items a program runs, and which KV blocks an item visits: all roles ask here, so they agree."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uniattn.kernels.blocks import bounds
from uniattn.kernels.hopper.compat import aggregate, constexpr_function, from_triton
from uniattn.kernels.hopper.config import CONSUMER_ROWS, NUM_CONSUMERS

tile_range = from_triton(bounds.tile_range)
TILE_ROWS = gl.constexpr(CONSUMER_ROWS * NUM_CONSUMERS)


@gluon.jit
def place(turn):
    """Place in the plan's list of this program's record number `turn`: rounds run forth and back, which deals a sorted list out evenly."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, pid, programs - 1 - pid)


@aggregate
class Item:
    """A query tile, or a piece of its KV blocks, for one KV head.

    Attributes:
        seq, q_len, kv_len, kv_head: as the plan's record has them.
        right: the window's right side, causality in it. `readable`: KV tokens that exist.
        begin, end: KV tokens that some row of the tile sees. `first_block`, `last_block`: the item's blocks, both inclusive. An
            item without any token has one block, which no row sees.
    """

    seq: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    kv_head: gl.tensor
    right: gl.tensor
    readable: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    first_block: gl.tensor
    last_block: gl.tensor

    @constexpr_function
    def __init__(
        self, seq, q_len, kv_len, kv_head, right, readable, begin, end, first_block, last_block,
    ):  # fmt: skip
        self.seq = seq
        self.q_len = q_len
        self.kv_len = kv_len
        self.kv_head = kv_head
        self.right = right
        self.readable = readable
        self.begin = begin
        self.end = end
        self.first_block = first_block
        self.last_block = last_block


@gluon.jit
def load_item(cfg, record, causal_ptr, num_seqs, kv_capacity, window_left, window_right):
    """The item of a record: a pointer to its ints (`kernels.plan`) in global memory."""
    return make_item(
        cfg, gl.load(record), gl.load(record + 1), gl.load(record + 3), gl.load(record + 4), gl.load(record + 5), gl.load(record + 7),
        causal_ptr, num_seqs, kv_capacity, window_left, window_right,
    )  # fmt: skip


@gluon.jit
def make_item(
    cfg, seq, first_row, q_len, kv_len, piece, kv_head, causal_ptr, num_seqs, kv_capacity, window_left, window_right
):  # fmt: skip
    """The item of a record's ints."""
    split = piece & 0xFFFF
    num_splits = piece >> 16
    right = window_right
    if causal_ptr is not None:
        right = gl.where(gl.load(causal_ptr + gl.minimum(seq, num_seqs - 1)) != 0, 0, right)
    elif cfg.causal:
        right = window_right * 0
    readable = gl.minimum(kv_len, kv_capacity)
    begin, _, _, end = tile_range(kv_len, q_len, first_row, window_left, right, readable, cfg.group, TILE_ROWS)
    sees_nothing = end <= begin
    begin = gl.where(sees_nothing, 0, begin)
    end = gl.where(sees_nothing, 0, end)
    first = begin // cfg.block_n
    # The builder cuts no tile into more pieces than it has blocks.
    num_blocks = gl.maximum((end + cfg.block_n - 1) // cfg.block_n - first, 1)
    last = first + num_blocks * (split + 1) // num_splits - 1
    first = first + num_blocks * split // num_splits
    return Item(
        seq, q_len, kv_len, kv_head, right, readable, begin, end, first, last
    )  # fmt: skip
