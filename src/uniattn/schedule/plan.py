"""What a plan is."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Plan:
    """How a batch's work is cut; chosen from host-known bounds alone."""

    block_m: int
    num_splits: int

    def as_ints(self) -> list[int]:
        return list(astuple(self))
