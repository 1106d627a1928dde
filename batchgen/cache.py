"""Where batchgen keeps what can be made again: converted models, hashes of weight files, compiled kernels.

Called by whatever caches. Standard library only, so that every process may import it.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder, made if missing.

    `$BATCHGEN_CACHE`, else `batchgen` in `$XDG_CACHE_HOME` or in `~/.cache`.

    Raises:
        OSError: the folder cannot be made.
    """
    given = os.environ.get("BATCHGEN_CACHE")
    if given:
        folder = Path(given).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
