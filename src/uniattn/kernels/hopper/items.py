"""Which items a program runs, in which order, and which KV blocks an item visits: all roles ask here, so they agree."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uniattn.kernels.blocks import bounds
from uniattn.kernels.hopper.compat import aggregate, constexpr_function, from_triton
from uniattn.kernels.hopper.config import CONSUMER_ROWS, NUM_CONSUMERS

tile_range = from_triton(bounds.tile_range)
TILE_ROWS = gl.constexpr(CONSUMER_ROWS * NUM_CONSUMERS)
# Items of one pass over the KV heads read no more K/V than this, so that L2 (50 MB) serves the tiles of a sequence after the first.
L2_BYTES = gl.constexpr(32 << 20)


@aggregate
class Order:
    """The batch's items in the order in which they run; position p belongs to one program.

    Attributes:
        num_large: items of large tiles times KV heads. `total`: all items times KV heads.
        heads: KV heads of large items that run together.
    """

    items_ptr: gl.tensor
    num_large: gl.tensor
    total: gl.tensor
    heads: gl.tensor
    num_kv_heads: gl.tensor

    @constexpr_function
    def __init__(self, items_ptr, num_large, total, heads, num_kv_heads):
        self.items_ptr = items_ptr
        self.num_large = num_large
        self.total = total
        self.heads = heads
        self.num_kv_heads = num_kv_heads

    @gluon.jit
    def place(self, turn):
        """Position of this program's item number `turn`: rounds run forth and back, which deals a sorted list out evenly."""
        programs = gl.num_programs(0)
        pid = gl.program_id(0)
        return turn * programs + gl.where(turn % 2 == 0, pid, programs - 1 - pid)

    @gluon.jit
    def at(self, p):
        """`(record pointer, kv_head)` of position p.

        Large and small items interleave in proportion, each longest first: decode's bytes then hide under prefill's products. Large
        items run a few heads at a time, so that their K/V stays in L2.
        """
        p = gl.minimum(p, self.total - 1)
        before = (p.to(gl.int64) * self.num_large // self.total).to(gl.int32)
        after = ((p.to(gl.int64) + 1) * self.num_large // self.total).to(gl.int32)
        small = p - before
        num_tiles = self.num_large // self.num_kv_heads
        per_pass = gl.maximum(num_tiles * self.heads, 1)
        within = before % per_pass
        is_large = after > before
        item = gl.where(is_large, within // self.heads, num_tiles + small // self.num_kv_heads)
        kv_head = gl.where(is_large, before // per_pass * self.heads + within % self.heads, small % self.num_kv_heads)
        return self.items_ptr + (1 + item) * 8, kv_head


@gluon.jit
def make_order(cfg, items_ptr, num_kv_heads):
    """Read the plan's header: numbers of large and small items, and the longest item in KV tokens."""
    num_large = gl.load(items_ptr) * num_kv_heads
    total = num_large + gl.load(items_ptr + 1) * num_kv_heads
    bytes_a_head = gl.load(items_ptr + 2).to(gl.int64) * ((cfg.d + cfg.dv) * (cfg.dtype.primitive_bitwidth // 8))
    heads = num_kv_heads
    while (heads % 2 == 0) & (heads * bytes_a_head > L2_BYTES):
        heads = heads // 2
    return Order(items_ptr, num_large, total, heads, num_kv_heads)


@aggregate
class Item:
    """A query tile, or a piece of its KV blocks, for one KV head.

    Attributes:
        seq, first_row, q_begin, q_len, kv_len: as the plan's record has them.
        part: place of the piece's partial result; negative where the tile is not cut.
        first_piece: whether it is the first, which alone takes the sink.
        left, right: the window, causality in it. `readable`: KV tokens that exist.
        begin, end: KV tokens that some row of the tile sees. `first_block`, `last_block`: the item's blocks, both inclusive. An
            item without any token has one block, which no row sees.
    """

    seq: gl.tensor
    first_row: gl.tensor
    q_begin: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    kv_head: gl.tensor
    part: gl.tensor
    first_piece: gl.tensor
    right: gl.tensor
    readable: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    first_block: gl.tensor
    last_block: gl.tensor

    @constexpr_function
    def __init__(
        self, seq, first_row, q_begin, q_len, kv_len, kv_head, part, first_piece, right, readable, begin, end, first_block,
        last_block,
    ):  # fmt: skip
        self.seq = seq
        self.first_row = first_row
        self.q_begin = q_begin
        self.q_len = q_len
        self.kv_len = kv_len
        self.kv_head = kv_head
        self.part = part
        self.first_piece = first_piece
        self.right = right
        self.readable = readable
        self.begin = begin
        self.end = end
        self.first_block = first_block
        self.last_block = last_block


@gluon.jit
def load_item(cfg, order, p, causal_ptr, num_seqs, kv_capacity, window_left, window_right):
    """The item at position p of the order."""
    record, kv_head = order.at(p)
    seq = gl.load(record)
    first_row = gl.load(record + 1)
    q_begin = gl.load(record + 2)
    q_len = gl.load(record + 3)
    kv_len = gl.load(record + 4)
    split = gl.load(record + 5)
    num_splits = gl.load(record + 6)
    partial = gl.load(record + 7)
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
    part = gl.where(partial < 0, -1, (partial + split) * order.num_kv_heads + kv_head)
    takes_sink = (split == 0) & (seq != num_seqs)
    return Item(
        seq, first_row, q_begin, q_len, kv_len, kv_head, part, takes_sink, right, readable, begin, end, first, last
    )  # fmt: skip
