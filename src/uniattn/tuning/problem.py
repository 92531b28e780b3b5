"""What a table is asked by: a batch's sizes as the host knows them without reading the device, and the class that they fall into."""

from typing import NamedTuple

from uniattn.schedule.tiles import cdiv

# A class ends at 16 times a power of 4; the first holds decode's rows up to one tile, the second drafts'.
_FIRST_ROWS, _LAST_ROWS = 16, 65536
_FIRST_PAIRS, _LAST_PAIRS = 1, 16384


class Problem(NamedTuple):
    """A batch as far as the choice of tiles depends on it: the key of an exact answer.

    Attributes:
        num_tokens, num_seqs: query tokens, padding included, and sequences.
        longest: bound of a sequence's query tokens.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: of q and the caches.
        itemsize: bytes an element; bfloat16 and float16 take the same of a chip.
        page_size: KV tokens a page, 0 for contiguous K/V.
        windowed: whether there is a window, whatever its size.
    """

    num_tokens: int
    num_seqs: int
    longest: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    page_size: int
    windowed: bool

    @property
    def rows(self) -> int:
        """Query rows (query tokens x group) that a sequence brings on average."""
        # A bound far above the mean (a graph captured for any mix) would give decodes prefill's tiles; any tile size is right.
        mean = cdiv(self.num_tokens, max(1, self.num_seqs))
        return min(self.longest, mean) * (self.num_q_heads // self.num_kv_heads)

    @property
    def bucket(self) -> "Bucket":
        """The class that the problem falls into."""
        mean = max(1, min(self.longest, cdiv(self.num_tokens, max(1, self.num_seqs))))
        return Bucket(
            self.itemsize, self.head_dim, self.v_head_dim, page_class(self.page_size), self.windowed, self.longest > 4 * mean,
            _class(self.rows, _FIRST_ROWS, _LAST_ROWS), _class(self.num_seqs * self.num_kv_heads, _FIRST_PAIRS, _LAST_PAIRS),
        )  # fmt: skip


class Bucket(NamedTuple):
    """A class of problems that are answered alike: the key of a bucket's answer.

    A kernel sees rows a sequence and pairs of a sequence and a KV head, so that any ratio of query to KV heads falls into the
    same classes. KV lengths are no part: under a CUDA graph their bound is the model's, and the plan cuts by the lengths themselves.

    Attributes:
        itemsize, head_dim, v_head_dim, windowed: as in `Problem`.
        pages: "contiguous", "short" (less than 16 tokens a page) or "paged".
        mixed: the longest sequence may bring more than 4 times the mean.
        rows: query rows a sequence, rounded up to 16, 64, 256, ... 65536; the last class has no bound.
        pairs: sequences times KV heads, rounded up to 1, 4, 16, ... 16384; the last class has no bound.
    """

    itemsize: int
    head_dim: int
    v_head_dim: int
    pages: str
    windowed: bool
    mixed: bool
    rows: int
    pairs: int


def problem(
    num_tokens: int,
    num_seqs: int,
    max_seqlen_q: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    page_size: int,
    windowed: bool,
) -> Problem:
    """The problem of a batch; `max_seqlen_q` is any bound in tokens, which the batch's sizes may lower."""
    # Each sequence brings a token as a rule; where some bring none, the bound is only a worse one.
    longest = min(max_seqlen_q, max(num_tokens - num_seqs + 1, cdiv(num_tokens, max(1, num_seqs))))
    return Problem(
        num_tokens, num_seqs, longest, num_q_heads, num_kv_heads, head_dim, v_head_dim, itemsize, page_size, windowed
    )  # fmt: skip


def page_class(page_size: int) -> str:
    """`Bucket.pages` of a page size; 0 is contiguous K/V."""
    if page_size == 0:
        return "contiguous"
    return "short" if page_size < 16 else "paged"


def _class(n: int, first: int, last: int) -> int:
    """The least of `first`, 4 `first`, ... `last` that is at least `n`, else `last`."""
    while first < n and first < last:
        first *= 4
    return first
