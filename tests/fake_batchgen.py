"""`batchgen` with fake workers: `python tests/fake_batchgen.py run job.yaml`.

The same command line, and everything behind it, but for the engine; see `fake_engine.py`. A model folder
needs no more than a `config.json`.
"""

from __future__ import annotations

import sys

from fake_engine import launcher

from batchgen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(launch=launcher()))
