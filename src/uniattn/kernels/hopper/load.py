"""The loading roles: a warp brings the pages of K by TMA and another those of V, others bring Q and hand out the work.

TMA needs a descriptor, and the host one call of the driver to make it: the caches keep theirs for life, so K and V have them. Q comes
at a new address each step, so its rows are copied by address (cp.async).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from uniattn.kernels.hopper.compat import copy_by_address, copy_by_map
from uniattn.kernels.hopper.items import load_record, make_item, next_place, read_record


@gluon.jit
def _copy_block(cfg, desc, row_ptr, block, begin, end, no_page, kv_head, ring, slot):
    """Bring a block, box by box, into a slot of the ring, which is full when the last byte has come.

    A box that nobody sees, outside `[begin, end)`, comes from `no_page`, past the cache's end: TMA brings zeros for it. Its entry of the
    page table, which may hold anything, is not read. The entries come while the slot is waited for.
    """
    pages = gl.tuple([])
    for i in gl.static_range(cfg.boxes):
        token = block * cfg.block_n + i * cfg.box
        seen = (token + cfg.box > begin) & (token < end)
        pages += (gl.load(row_ptr + token // cfg.page_size, mask=seen, other=no_page).to(gl.int32),)
    ring.wait_empty(slot)
    stage = ring.stage(slot)
    full = ring.full.index(stage)
    buffer = ring.buffers.index(stage)
    mbarrier.expect(full, cfg.block_n * buffer.shape[1] * (cfg.dtype.primitive_bitwidth // 8))
    for i in gl.static_range(cfg.boxes):
        first_slot = (block * cfg.block_n + i * cfg.box) % cfg.page_size
        copy_by_map(desc, [pages[i], kv_head, first_slot, 0], full, buffer.slice(i * cfg.box, cfg.box))


@gluon.jit
def load_blocks(cfg, record, record_ring, wanted, desc, ring, page_table_ptr, page_table_stride, causal_ptr, num_pages, num_seqs,
                kv_capacity, window_left, window_right, ASKS: gl.constexpr):  # fmt: skip
    """Role of one warp: all blocks of K, or of V, of this program's items, each from its last block to its first.

    `record` is the first record's ints. The one of two such warps that ASKS says through the barrier `wanted` when the next is to be
    taken: late, so that it goes to who is free, and early enough that it and its Q are there when this one is done.
    """
    turn = 0
    slot = 0
    seq, first_row, _, q_len, kv_len, piece, _, kv_head = record
    # The ring holds the first record for the other roles.
    record_ring.release(0)
    while piece != 0:
        item = make_item(cfg, seq, first_row, q_len, kv_len, piece, kv_head, causal_ptr, num_seqs, kv_capacity, window_left, window_right)
        row_ptr = page_table_ptr + gl.minimum(seq, num_seqs - 1).to(gl.int64) * page_table_stride
        num_blocks = item.last_block - item.first_block + 1
        for i in range(num_blocks):
            if ASKS:
                mbarrier.arrive(wanted, count=1, pred=i == gl.maximum(num_blocks - 5, 0))
            _copy_block(cfg, desc, row_ptr, item.last_block - i, item.begin, item.end, num_pages, kv_head, ring, slot)
            slot += 1
        turn += 1
        record_ring.wait_full(turn)
        seq, first_row, _, q_len, kv_len, piece, _, kv_head = read_record(record_ring, turn, cfg.one_warp)
        record_ring.release(turn)


@gluon.jit
def _hand_out(cfg, record_ring, turn, record):
    """Give the other roles their record number `turn`; one of no pieces ends the list."""
    word = gl.arange(0, 8, cfg.word)
    words = gl.full([8], 0, gl.int32, cfg.word)
    for i in gl.static_range(8):
        words = gl.where(word == i, record[i], words)
    record_ring.wait_empty(turn)
    record_ring.buffers.index(record_ring.stage(turn)).store(words)
    mbarrier.arrive(record_ring.full.index(record_ring.stage(turn)), count=1)


@gluon.jit
def _copy_rows(cfg, q_ring, stage, first_row, num_rows, tile_ptr, q_token_stride, q_head_stride):
    """Bring a tile's rows, a row `(token, head)` after the other; `tile_ptr` points at the first head of the first row's token.

    Rows that do not exist stay as they are, since no row reads another's: a decode of four heads brings 16 rows, not 128.
    """
    ROWS: gl.constexpr = 16
    row = gl.arange(0, ROWS, gl.SliceLayout(1, cfg.q_copy))
    dim = gl.arange(0, cfg.d, gl.SliceLayout(0, cfg.q_copy))
    for c in gl.static_range(2 * cfg.rows // ROWS):
        if first_row + c * ROWS < num_rows:
            r = first_row % cfg.group + c * ROWS + row
            # Within a tile 32 bits are enough (`schedule.hopper.serves`).
            offset = r // cfg.group * q_token_stride + r % cfg.group * q_head_stride
            exists = (first_row + c * ROWS + row < num_rows)[:, None] & (dim < cfg.head_dim)[None, :]
            part = q_ring.buffers.index(stage * 2 + c * ROWS // cfg.rows).slice(c * ROWS % cfg.rows, ROWS)
            copy_by_address(part, tile_ptr + (offset[:, None] + dim[None, :]), exists)


@gluon.jit
def load_queries(cfg, record, items_ptr, taken_ptr, num_records, wanted, q_ring, record_ring, q_ptr, q_token_stride, q_head_stride):
    """Role of `q_warps` warps: take records, hand them to the other roles, and bring their query rows. `record`: the first one's ints."""
    turn = 0
    while record[5] != 0:
        _hand_out(cfg, record_ring, turn, record)
        _, first_row, q_begin, q_len, _, _, _, kv_head = record
        token = (q_begin + first_row // cfg.group).to(gl.int64)
        tile_ptr = q_ptr + token * q_token_stride + (kv_head * cfg.group).to(gl.int64) * q_head_stride
        q_ring.wait_empty(turn)
        stage = q_ring.stage(turn)
        _copy_rows(cfg, q_ring, stage, first_row, q_len * cfg.group, tile_ptr, q_token_stride, q_head_stride)
        async_copy.mbarrier_arrive(q_ring.full.index(stage), increment_count=False)
        mbarrier.wait(wanted, turn & 1)
        record = load_record(items_ptr, next_place(taken_ptr, num_records), num_records)
        turn += 1
    _hand_out(cfg, record_ring, turn, record)
