"""`uniattn tune` measures what `uniattn.tuning` answers from, `uniattn explain` tells what it answers."""
