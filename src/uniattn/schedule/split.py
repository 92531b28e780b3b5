"""How often to split K/V: pure integer rules, from bounds that the host knows. No lengths are read."""

# A split shorter than this many KV blocks costs more in its merge than it gains.
MIN_BLOCKS_PER_SPLIT = 4
# A larger number of splits must lift the last wave's use of the chip to this share of the best before it is worth its merge.
GOOD_ENOUGH = 0.85


def num_splits(num_programs: int, max_kv_blocks: int, num_slots: int) -> int:
    """Splits for a launch of `num_programs` unsplit programs on a chip that holds `num_slots` of them at once.

    `max_kv_blocks` bounds the KV blocks of the longest sequence. Returns the smallest count whose waves fill the chip nearly
    as well as the best one's; 1 where the unsplit launch fills 0.8 of the chip or where K/V is short.
    """
    most = min(max_kv_blocks // MIN_BLOCKS_PER_SPLIT, 128, cdiv(4 * num_slots, num_programs))
    if most <= 1 or num_programs >= 0.8 * num_slots:
        return 1
    use = [_wave_use(num_programs * s, num_slots) for s in range(1, most + 1)]
    return next(s for s, u in enumerate(use, 1) if u >= GOOD_ENOUGH * max(use))


def _wave_use(num_programs: int, num_slots: int) -> float:
    """Share of the chip that `num_programs` equal programs keep busy."""
    return num_programs / (cdiv(num_programs, num_slots) * num_slots)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
