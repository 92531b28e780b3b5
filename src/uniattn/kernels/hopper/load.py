"""The loading roles: one warp brings the pages of K and V by TMA, others bring Q.

TMA needs a descriptor, and the host one call of the driver to make it: the caches keep theirs for life, so K and V have them. Q comes
at a new address each step, so its rows are copied by address (cp.async).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from uniattn.kernels.hopper.compat import copy_by_address, copy_by_map
from uniattn.kernels.hopper.items import load_item, place


@gluon.jit
def _page_ids(cfg, row_ptr, block, begin, end, no_page):
    """Page of each box of a block. A box that nobody sees gets `no_page`, past the cache's end: TMA brings zeros for it.

    Its entry of the page table is not read: it may hold anything.
    """
    ids = gl.tuple([])
    for i in gl.static_range(cfg.boxes):
        token = block * cfg.block_n + i * cfg.box
        seen = (token + cfg.box > begin) & (token < end)
        ids += (gl.load(row_ptr + token // cfg.page_size, mask=seen, other=no_page).to(gl.int32),)
    return ids


@gluon.jit
def _copy_block(cfg, desc, ids, block, kv_head, ring, slot):
    """Bring a block's boxes into a slot of the ring, which is full when the last byte has come."""
    ring.wait_empty(slot)
    stage = ring.stage(slot)
    full = ring.full.index(stage)
    buffer = ring.buffers.index(stage)
    mbarrier.expect(full, cfg.block_n * buffer.shape[1] * (cfg.dtype.primitive_bitwidth // 8))
    for i in gl.static_range(cfg.boxes):
        first_slot = (block * cfg.block_n + i * cfg.box) % cfg.page_size
        part = buffer.slice(i * cfg.box, cfg.box)
        copy_by_map(desc, [ids[i], kv_head, first_slot, 0], full, part)


@gluon.jit
def load_kv(cfg, records_ptr, num_records, k_desc, v_desc, k_ring, v_ring, page_table_ptr, page_table_stride, causal_ptr, num_pages,
            num_seqs, kv_capacity, window_left, window_right):  # fmt: skip
    """Role of one warp: all blocks of this program's items, each from its last block to its first.

    Page ids are read one block ahead, and records one item ahead, so that the copies do not wait for them.
    """
    turn = 0
    slot = 0
    p = place(0)
    # The first record is there whatever the number of records; that it counts is known a wait later.
    item = load_item(cfg, records_ptr + p * 8, causal_ptr, num_seqs, kv_capacity, window_left, window_right)
    if p < num_records:
        row_ptr = page_table_ptr + gl.minimum(item.seq, num_seqs - 1).to(gl.int64) * page_table_stride
        ids = _page_ids(cfg, row_ptr, item.last_block, item.begin, item.end, num_pages)
        while p < num_records:
            turn += 1
            p = place(turn)
            record = records_ptr + gl.minimum(p, num_records - 1) * 8
            following = load_item(cfg, record, causal_ptr, num_seqs, kv_capacity, window_left, window_right)
            following_ptr = page_table_ptr + gl.minimum(following.seq, num_seqs - 1).to(gl.int64) * page_table_stride
            for i in range(item.last_block - item.first_block + 1):
                block = item.last_block - i
                is_last = block == item.first_block
                next_ids = _page_ids(
                    cfg, gl.where(is_last, following_ptr, row_ptr), gl.where(is_last, following.last_block, block - 1),
                    gl.where(is_last, following.begin, item.begin), gl.where(is_last, following.end, item.end), num_pages,
                )  # fmt: skip
                _copy_block(cfg, k_desc, ids, block, item.kv_head, k_ring, slot)
                _copy_block(cfg, v_desc, ids, block, item.kv_head, v_ring, slot)
                ids = next_ids
                slot += 1
            item = following
            row_ptr = following_ptr


@gluon.jit
def load_queries(cfg, records_ptr, num_records, q_ring, record_ring, q_ptr, q_token_stride, q_head_stride):
    """Role of `q_warps` warps: hand each item's record to the consumers, and bring its query rows, a row `(token, head)` after the other.

    Rows that do not exist stay as they are, since no row reads another's.
    """
    ROWS: gl.constexpr = 16
    row = gl.arange(0, ROWS, gl.SliceLayout(1, cfg.q_copy))
    dim = gl.arange(0, cfg.d, gl.SliceLayout(0, cfg.q_copy))
    turn = 0
    p = place(0)
    while p < num_records:
        record = records_ptr + p * 8
        record_ring.wait_empty(turn)
        words = record_ring.buffers.index(record_ring.stage(turn))
        word = gl.arange(0, 8, cfg.word)
        words.store(gl.load(record + word))
        mbarrier.arrive(record_ring.full.index(record_ring.stage(turn)), count=1)
        first_row = gl.load(record + 1)
        q_begin = gl.load(record + 2)
        q_len = gl.load(record + 3)
        kv_head = gl.load(record + 7)
        q_ring.wait_empty(turn)
        stage = q_ring.stage(turn)
        for part in gl.static_range(2):
            if first_row + part * cfg.rows < q_len * cfg.group:
                buffer = q_ring.buffers.index(stage * 2 + part)
                for c in gl.static_range(cfg.rows // ROWS):
                    r = first_row + part * cfg.rows + c * ROWS + row
                    head = kv_head * cfg.group + r % cfg.group
                    offset = (q_begin + r // cfg.group).to(gl.int64) * q_token_stride + head.to(gl.int64) * q_head_stride
                    exists = (r < q_len * cfg.group)[:, None] & (dim < cfg.head_dim)[None, :]
                    copy_by_address(buffer.slice(c * ROWS, ROWS), q_ptr + offset[:, None] + dim[None, :], exists)
        async_copy.mbarrier_arrive(q_ring.full.index(stage), increment_count=False)
        turn += 1
        p = place(turn)
