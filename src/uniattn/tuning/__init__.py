"""Which kernel and tiles serve a batch: a table of measurements for each card, and the chip's facts where none answers.

`choose.choose` answers from the batch's sizes alone: the very batch that was measured (exact), then its class (bucket), then
`heuristic.choose`. `uniattn tune` writes tables, `uniattn explain` tells who answered.
"""
