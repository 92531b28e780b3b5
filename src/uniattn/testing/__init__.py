"""What the tests, the benchmarks and users' own tests share: batches, poison for what must not be read, derived tolerances."""

from uniattn.testing.batches import LAYOUTS, Batch, make_batch
from uniattn.testing.compare import assert_matches_oracle, assert_within, oracle
from uniattn.testing.poison import poison_page_table, poison_unread, poisoned_allocations, poisoned_out

__all__ = [
    "LAYOUTS",
    "Batch",
    "assert_matches_oracle",
    "assert_within",
    "make_batch",
    "oracle",
    "poison_page_table",
    "poison_unread",
    "poisoned_allocations",
    "poisoned_out",
]
