"""Numbers that stand for 'no limit' and how windows are told to the kernels."""

# Larger than any position and small enough that position + UNBOUNDED fits an int32.
UNBOUNDED = 1 << 30


def window_bounds(window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """`(left, right)` in tokens, inclusive, with None and -1 turned into `UNBOUNDED`."""
    if window is None:
        return UNBOUNDED, UNBOUNDED
    left, right = (UNBOUNDED if w is None or w == -1 else min(w, UNBOUNDED) for w in window)
    return left, right
