"""`batchgen` with fake workers: `python tests/fake_batchgen.py run job.yaml`.

The same command line, and everything behind it, but for the engine; see `fake_engine.py`. A model folder
needs no more than a `config.json`, because the weights that it lacks are taken to be there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fake_engine import launcher

from batchgen.cli.main import main
from batchgen.models import source


def _those_that_are_there(folder: Path, allow_pickle: bool, what: str) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


if __name__ == "__main__":
    source.weight_files = _those_that_are_there
    sys.exit(main(launch=launcher()))
