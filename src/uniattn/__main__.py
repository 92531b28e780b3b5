"""`python -m uniattn`: the command line, where no `uniattn` script is installed."""

import sys

from uniattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
