"""Which items a program runs, and which KV blocks an item visits: all roles ask here, so they agree."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uniattn.kernels.blocks import bounds
from uniattn.kernels.hopper.compat import aggregate, constexpr_function, from_triton
from uniattn.kernels.hopper.config import CONSUMER_ROWS, NUM_CONSUMERS

tile_range = from_triton(bounds.tile_range)
TILE_ROWS = gl.constexpr(CONSUMER_ROWS * NUM_CONSUMERS)


@gluon.jit
def next_place(taken_ptr, num_records):
    """Place in the plan's list of the record that this program runs next; at or past `num_records`: none is left.

    The first of a program is its own number, and the rest are taken as programs come, in the list's order. `num_records` are asked for
    in all, whatever the number of programs, and the last to ask sets the count back to 0 for the next launch with the plan.
    """
    taken = gl.atomic_add(taken_ptr, 1)
    if taken == num_records - 1:
        gl.store(taken_ptr, 0)
    return taken + gl.num_programs(0)


@gluon.jit
def load_record(items_ptr, place, num_records):
    """The eight ints of the record at `place`; all 0 past the end, so that the record has no pieces.

    There is memory at any program's first place, so that its record need not wait for `num_records`.
    """
    ints = gl.tuple([])
    for i in gl.static_range(8):
        ints += (gl.load(items_ptr + (1 + place) * 8 + i),)
    exists = place < num_records
    record = gl.tuple([])
    for i in gl.static_range(8):
        record += (gl.where(exists, ints[i], 0),)
    return record


@gluon.jit
def read_record(ring, turn, LAYOUT: gl.constexpr):
    """The ints of this program's record number `turn`, which the loaders have put into shared memory.

    Cheap enough to be done again where they are needed, so that nothing of them stays in registers through an item's loops.
    """
    words = ring.buffers.index(ring.stage(turn)).load(LAYOUT)
    ints = gl.tuple([])
    for i in gl.static_range(8):
        ints += (gl.sum(gl.where(gl.arange(0, 8, LAYOUT) == i, words, 0), 0),)
    return ints


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
def make_item(
    cfg, seq, first_row, q_len, kv_len, piece, kv_head, causal_ptr, num_seqs, kv_capacity, window_left, window_right
):  # fmt: skip
    """The item of a record's ints. The end of the list has no pieces, and gives an item of no consequence."""
    split = piece & 0xFFFF
    num_splits = gl.maximum(piece >> 16, 1)
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
