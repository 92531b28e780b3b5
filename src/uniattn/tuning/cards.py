"""Facts of well-known chips by their makers' data sheets, for machines without one: `uniattn explain --card`, compilation ahead of time."""

from uniattn.launch.target import Target

#: By the name that `--card` takes.
CARDS = {
    "a100": Target("NVIDIA A100-SXM4-80GB", "cuda", 80, 108, 166912, 2.04e12),
    "h100": Target("NVIDIA H100 80GB HBM3", "cuda", 90, 132, 232448, 3.35e12),
    "h200": Target("NVIDIA H200", "cuda", 90, 132, 232448, 4.9e12),
    "b200": Target("NVIDIA B200", "cuda", 100, 148, 232448, 8.0e12),
    "l40s": Target("NVIDIA L40S", "cuda", 89, 142, 101376, 0.864e12),
    "rtx-4090": Target("NVIDIA GeForce RTX 4090", "cuda", 89, 128, 101376, 1.008e12),
    "mi300x": Target("AMD Instinct MI300X", "hip", "gfx942", 304, 65536, 5.3e12),
    "mi355x": Target("AMD Instinct MI355X", "hip", "gfx950", 256, 163840, 8.0e12),
}
