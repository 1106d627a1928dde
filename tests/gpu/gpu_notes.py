"""What a section of the GPU check finds, written down at once: a section that dies has said all it knew."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRY = {
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "kv_cache_memory": 1 << 22,
}
_MOST = 6000
"""Characters of a traceback, its end."""
CHECK, FIGURE, SKIPPED = "check", "figure", "skipped"


@dataclass(frozen=True)
class Notes:
    """One section's file of JSON lines."""

    section: str
    file: Path

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        """Something that must hold."""
        self._write(CHECK, name, ok=bool(ok), detail=detail)

    def crashed(self, name: str, error: Exception) -> None:
        """Something that must hold, and of which an exception is all that is known."""
        detail = f"{type(error).__name__}: {error}"[:600]
        self._write(CHECK, name, ok=False, detail=detail, traceback=traceback.format_exc()[-_MOST:])

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A part of a section that ends alone: what it raises is noted, and the section goes on."""
        try:
            yield
        except Exception as error:
            self.crashed(name, error)

    def figure(
        self, name: str, value: float, unit: str, *, least: float | None = None, most: float | None = None
    ) -> None:
        """Something measured, and the least or the most that is wanted."""
        value = float(value)
        met = None
        if least is not None or most is not None:
            met = (least is None or value >= least) and (most is None or value <= most)
        self._write(FIGURE, name, value=value, unit=unit, least=least, most=most, met=met)

    def skip(self, name: str, reason: str) -> None:
        """Something that could not be run here."""
        self._write(SKIPPED, name, reason=reason)

    def fact(self, name: str, value: Any) -> None:
        """Something to know of the machine, or a table."""
        self._write("fact", name, value=value)

    def _write(self, kind: str, name: str, **more: Any) -> None:
        line = {"section": self.section, "kind": kind, "name": name, "at": time.time(), **more}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {k: v for k, v in more.items() if kind != "fact" and k != "traceback"}
        print(f"[{self.section}] {kind} {name}: {shown}", flush=True)
        if "traceback" in more:
            print(more["traceback"], flush=True)


@dataclass(frozen=True)
class Place:
    """Where a section runs: a GPU, or in a dry run the processor with interpreted kernels and tiny sizes."""

    dry: bool

    @property
    def device(self) -> Any:
        """Of tensors."""
        import torch

        return torch.device("cpu" if self.dry else "cuda")

    @property
    def half(self) -> str:
        """The 16-bit dtype to check; the interpreter gets products in bfloat16 wrong."""
        return "float16" if self.dry else "bfloat16"

    def llm(self, model: str, **settings: Any) -> Any:
        """An engine here; in a dry run a small one, whose largest step takes seconds."""
        import batchgen as bg

        if self.dry:
            settings |= DRY
        return bg.LLM(model, attention="triton", device=self.engine_device, **settings)

    @property
    def engine_device(self) -> str:
        """What `engine.device` is."""
        return "cpu" if self.dry and not self._stand_in() else "cuda"

    def _stand_in(self) -> bool:
        """In a dry run engines take the processor for a GPU, if there is a stand-in for one."""
        try:
            import pytest
            from stand_in_gpu import stand_in_gpu
        except ImportError:
            return False
        stand_in_gpu(pytest.MonkeyPatch())
        return True

    def sync(self) -> None:
        """Wait for the GPU."""
        import torch

        if not self.dry:
            torch.cuda.synchronize()
