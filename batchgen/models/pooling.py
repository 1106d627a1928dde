"""How a model says that its hidden states are to be pooled: the files of sentence-transformers beside it.

`modules.json` lists what comes after the model, and `1_Pooling/config.json` says how states become one vector
(https://www.sbert.net/docs/sentence_transformer/usage/custom_models.html). No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchgen.scores import Pooling
from batchgen.types import UsageError

_KNOWN = frozenset({"Transformer", "Pooling", "Normalize"})
_MODES = {
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
}


def find_pooling(folder: Path) -> Pooling:
    """What the files in a model folder ask for; the last token where there are none.

    Raises:
        UsageError: they ask for something else, or cannot be read.
    """
    modules: list[dict[str, Any]] = _read(folder / "modules.json") or []
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in _KNOWN:
            raise UsageError(
                f"embedding.pooling: {folder / 'modules.json'} asks for a module {kind} behind the model, "
                "which batchgen does not have; set embedding.pooling: last or mean to embed without it"
            )
    paths = [
        str(module.get("path")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"
    ]
    file = folder / (paths[0] if paths else "1_Pooling") / "config.json"
    if "Pooling" in kinds and not file.is_file():
        raise UsageError(
            f"embedding.pooling: {file}, of which modules.json speaks, is missing; download it, or set "
            "embedding.pooling: last or mean"
        )
    config: dict[str, Any] = _read(file) or {}
    asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(config.get("pooling_mode"), str):
        asked = [config["pooling_mode"]]
    if not asked:
        return Pooling.LAST
    if len(asked) > 1 or asked[0] not in _MODES:
        raise UsageError(
            f"embedding.pooling: {file} asks for {' and '.join(asked)}; set embedding.pooling: last or mean"
        )
    return _MODES[asked[0]]


def embedding_size(folder: Path) -> int | None:
    """Numbers in the hidden states of a model, by its configuration; None where that does not say."""
    config: dict[str, Any] = _read(folder / "config.json") or {}
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    sizes = (config.get(name) for name in ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model"))
    return next((size for size in sizes if isinstance(size, int)), None)


def _read(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"embedding.pooling: {file} cannot be read ({error}); download it again, or set "
            "embedding.pooling: last or mean"
        ) from error
