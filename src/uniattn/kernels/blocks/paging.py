"""Where a KV token lies: element offsets of tokens in a paged cache or in contiguous K/V. Always 64-bit."""

import triton
import triton.language as tl


@triton.jit
def slots(kv, mask, page_table_ptr, first_token, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """`(page, slot)` of KV tokens `kv`, int64; `page_table_ptr` points at the sequence's row.

    PAGE_SIZE == 0 means contiguous K/V: page is 0 and slot counts from `first_token`. MASKED reads no entry
    under a false `mask`: those past a sequence's last page may hold anything.
    """
    if PAGE_SIZE == 0:
        return tl.zeros_like(kv).to(tl.int64), (first_token + kv).to(tl.int64)
    else:
        entry = page_table_ptr + kv // PAGE_SIZE
        page = tl.load(entry, mask=mask, other=0) if MASKED else tl.load(entry)
        return page.to(tl.int64), (kv % PAGE_SIZE).to(tl.int64)
