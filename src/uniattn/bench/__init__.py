"""`uniattn bench`: uniattn beside its peers on named batches, checked before it is timed.

- `workloads`, `grammar`, `traces`, `sweep`: which batches; nothing of them touches a device.
- `roofline`: what a batch costs at least.
- `batch`, `check`, `timing`, `providers`, `run`: on the GPU. Builds one batch at a time, checks each provider's output, times it.
- `records`, `report`, `recorded`, `html`, `svg`: what was measured, as data; tables and pages are pure functions of it.
"""
