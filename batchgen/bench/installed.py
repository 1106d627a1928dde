"""Which other engines are there to be measured: each has a virtual environment and a model of its own.

`make peers` makes them, in a folder outside the source tree, from one set of weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.bench.contest import Contestant

VARIABLE = "BATCHGEN_PEERS"
DEFAULT = "~/.cache/batchgen-peers"
REMEDY = "run `make peers` in batchgen's source tree"
MODEL = "models/smollm2-135m"
"""Of whose weights all are made."""
_SCRIPTS = Path(__file__).parent / "peers"
_PATHS = ("tokenizer",)
"""Options that are relative to the folder of all peers."""
_LIBRARIES = ("/usr/lib/*/libtcmalloc_minimal.so.4", "/usr/lib64/libtcmalloc_minimal.so.4")


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine as it is run.

    Args:
        name: for the table and for `--peer`.
        venv: folder of its virtual environment.
        script: module of `peers/`.
        model: file or folder of its model.
        precision: what its weights are computed in.
        options: of the script.
        shared_only: whether it differs from another only where rows share a prefix.
        preload: whether tcmalloc and its own OpenMP are loaded first, as its authors advise.
    """

    name: str
    venv: str
    script: str
    model: str
    precision: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    shared_only: bool = False
    preload: bool = False

    def missing(self, root: Path) -> str | None:
        """Why it cannot run; None if it can."""
        if not self._python(root).exists():
            return f"no {self._python(root)}"
        return None if (root / self.model).exists() else f"no {root / self.model}"

    def contestant(self, root: Path) -> Contestant:
        """Of `contest.py`."""
        options = {
            name: str(root / value) if name in _PATHS else value for name, value in self.options.items()
        }
        return Contestant(
            self.name,
            [str(self._python(root)), str(_SCRIPTS / "harness.py"), self.script],
            str(root / self.model),
            self.precision,
            options,
            self._environment(root),
            shared_only=self.shared_only,
        )

    def _environment(self, root: Path) -> dict[str, str]:
        libraries = ":".join(map(str, self._libraries(root))) if self.preload else ""
        return {"LD_PRELOAD": libraries} if libraries else {}

    def _python(self, root: Path) -> Path:
        return root / self.venv / "bin" / "python"

    def _libraries(self, root: Path) -> Iterator[Path]:
        for pattern in _LIBRARIES:
            yield from sorted(Path("/").glob(pattern.lstrip("/")))[:1]
        yield from sorted((root / self.venv).glob("lib/python*/site-packages/**/libiomp5.so"))[:1]


PEERS = (
    Peer("vllm", "vllm", "vllm_cpu", MODEL, preload=True),
    Peer("openvino", "openvino", "openvino_pipeline", "models/ov-fp32"),
    Peer(
        "openvino-prime",
        "openvino",
        "openvino_pipeline",
        "models/ov-fp32",
        options={"prime": True},
        shared_only=True,
    ),
    Peer("llama.cpp", "llamacpp", "llama_cpp_batches", "models/smollm2-f32.gguf"),
    Peer(
        "ctranslate2",
        "ct2",
        "ctranslate2_generator",
        "models/ct2-float32",
        options={"compute": "float32", "tokenizer": f"{MODEL}/tokenizer.json"},
    ),
    Peer("transformers", "hf", "transformers_generate", MODEL, options={"batch": 16}),
    Peer("openvino-int8", "openvino", "openvino_pipeline", "models/ov-int8", "int8"),
    Peer(
        "openvino-int8-prime",
        "openvino",
        "openvino_pipeline",
        "models/ov-int8",
        "int8",
        {"prime": True},
        shared_only=True,
    ),
    Peer("llama.cpp-q8", "llamacpp", "llama_cpp_batches", "models/smollm2-q8_0.gguf", "int8"),
    Peer(
        "ctranslate2-int8",
        "ct2",
        "ctranslate2_generator",
        "models/ct2-int8",
        "int8",
        {"compute": "int8", "tokenizer": f"{MODEL}/tokenizer.json"},
    ),
)


def peers_folder() -> Path:
    """Where they are, by `BATCHGEN_PEERS` if it is set."""
    return Path(os.environ.get(VARIABLE) or DEFAULT).expanduser().absolute()
