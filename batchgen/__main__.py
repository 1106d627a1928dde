"""`python -m batchgen` is the `batchgen` command."""

import sys

from batchgen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
