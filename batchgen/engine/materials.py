"""What an engine is made of once transformers has loaded its model.

`build.py` puts the rest together. The runner is checked against transformers before it is given out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from batchgen.engine.config import EngineConfig
from batchgen.engine.device import Device
from batchgen.engine.invariance import captured_steps_are_independent, find_row_multiple, find_step_multiple
from batchgen.engine.invariant_products import make_products_rowwise
from batchgen.engine.memory import MemoryPlan
from batchgen.engine.output_check import EXACT, ROUNDED, check_difference, output_difference
from batchgen.engine.runner import ModelRunner
from batchgen.engine.sizing import Sizing
from batchgen.grammar import counted
from batchgen.models.activations import make_activations_rowwise
from batchgen.models.experts import make_experts_rowwise
from batchgen.models.fused import Fusion
from batchgen.models.layer_attention import LayerAttention
from batchgen.models.loader import LoadedModel
from batchgen.models.parts import body_of
from batchgen.types import UsageError
from batchgen_kernels.backend import AttentionBackend

if TYPE_CHECKING:
    from batchgen_kernels.cpu.decoder import DecoderWeights
    from batchgen_kernels.triton_kernels.program import DeviceWeights

_LANES = 16
"""Numbers in the widest vector that torch has."""
_SLIGHTLY_ROUNDED = 0.1
"""As `ROUNDED`, where only the cache is coarser, or only products are."""
_ROUNDED_PROGRAM = 0.25
"""As `ROUNDED`, between a program and transformers that both compute in 16 bits and round at other places."""


class CheckedRunner(NamedTuple):
    """A runner that computes what transformers does, and what was found of the rows of its products.

    Their bits do not depend on how many there are, in multiples of `row_multiple`; None: they may.
    """

    runner: ModelRunner
    row_multiple: int | None


class Materials(Sizing):
    """A model that transformers has loaded, and what was found and chosen for it.

    Args:
        config: with every setting resolved that does not depend on memory.
        loaded: the model; our own products and layers take the place of some of its parts.
        layers: what each layer's attention needs.
        backend: of attention.
        device: where the model is.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        layers: list[LayerAttention],
        backend: AttentionBackend,
        device: Device,
    ) -> None:
        super().__init__(config, loaded, layers, backend, device)
        self.loaded = loaded
        self.substitutes = self._substitutes()

    def _substitutes(self) -> Fusion[Any] | None:
        body = body_of(self.loaded.model, self.loaded.task)
        if self.device.is_gpu:
            return self._fused_on_device(body) if self._backend.name == "triton" else None
        if self._backend.name != "cpu" or self._config.dtype != "float32":
            return None
        # Needs Numba, as the backend does.
        from batchgen.models.substitutes import Substitutes

        with torch.inference_mode():
            return Substitutes(self.loaded.model, body, quantise=self._config.quantization is not None)

    def _fused_on_device(self, body: Any) -> Fusion[Any]:
        # Needs Triton, as the backend does.
        from batchgen.models.device_decoder import read_device_decoder

        return Fusion(self.loaded.model, body, read_device_decoder(body))

    @property
    def decoder(self) -> DecoderWeights | DeviceWeights | None:
        fused = self.substitutes.decoder if self.substitutes else None
        return fused.weights if fused else None

    @property
    def description(self) -> str | None:
        return self.substitutes.description if self.substitutes else None

    def kept(self) -> list[torch.nn.Module]:
        return self.substitutes.kept() if self.substitutes else list(self.loaded.model.modules())

    def checked_runner(self, memory: MemoryPlan, *, invariant: bool) -> CheckedRunner:
        """A runner whose output was compared with what transformers computes.

        Layers that are one program and compute something else are given back to transformers.

        Args:
            memory: of the cache.
            invariant: whether to look for a number of rows to pad to that makes rows independent.

        Raises:
            UsageError: the model computes something else in pieces than as a whole.
        """
        limit, of_program = self._allowed_differences()
        checked, difference = self._try(memory, invariant)
        if self.substitutes and self.substitutes.decoder:
            reason = _against_the_program(difference, of_program)
            if reason:
                checked.runner.close()
                self.substitutes.unfuse(reason)
                checked, difference = self._try(memory, invariant)
        check_difference(difference, limit, self._config.quantization)
        if self.substitutes:
            self.substitutes.settle()
        return checked

    def capture(
        self, runner: ModelRunner, memory: MemoryPlan, row_multiple: int | None, *, invariant: bool
    ) -> list[str]:
        """Let a checked runner capture steps that only decode, if that is wanted.

        Args:
            runner: its cache is written.
            memory: of the cache.
            row_multiple: rows that steps are padded to.
            invariant: whether a row's bits do not depend on its batch; captured steps must keep that.

        Returns:
            What there is to say of it, for the user.

        Raises:
            UsageError: it was asked for, and cannot be.
        """
        asked = self._config.cuda_graphs
        if not self.captures:
            if asked is True:
                raise UsageError(
                    f"engine.cuda_graphs: true asks that decoding steps are captured, and a model for "
                    f"{self.loaded.task} has none; use auto"
                )
            return []
        sizes = self.graph_sizes(row_multiple or 1)
        try:
            runner.capture(sizes, self.graph_tokens(memory.max_model_len))
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if asked is True:
                raise UsageError(
                    f"engine.cuda_graphs: a step of this model could not be captured ({reason}); use auto"
                ) from error
            return [f"CUDA graphs: none, as a step could not be captured ({reason})"]
        if invariant and not captured_steps_are_independent(
            runner, self.loaded.vocab_size, self.max_tokens, self.max_seqs, sizes
        ):
            runner.capture([], 0)
            if asked is True:
                raise UsageError(
                    "engine.cuda_graphs: engine.deterministic asks for the same bits in every batch, and a "
                    "row has others in a captured step of this model; use cuda_graphs: auto"
                )
            return ["CUDA graphs: none, as a row would have other bits in a captured step"]
        return [f"CUDA graphs: {counted(len(sizes), 'step')} of up to {counted(sizes[0], 'row')} captured"]

    def _allowed_differences(self) -> tuple[float, float]:
        """From what transformers computes: of the model, and of layers that are one program."""
        if self._config.quantization is not None:
            return _SLIGHTLY_ROUNDED, _SLIGHTLY_ROUNDED
        if self._config.dtype == self._config.kv_cache_dtype == "float32":
            return EXACT, EXACT
        return ROUNDED, _SLIGHTLY_ROUNDED if self._config.dtype == "float32" else _ROUNDED_PROGRAM

    def _try(self, memory: MemoryPlan, invariant: bool) -> tuple[CheckedRunner, float | None]:
        on_gpu = self.device.is_gpu
        if invariant and on_gpu:
            make_products_rowwise(self.loaded.model)
        multiple = self._row_multiple() if invariant and not on_gpu else None
        runner = self.runner(memory.shape.layout, memory.num_blocks, multiple or 1)
        if invariant and on_gpu:
            multiple = find_step_multiple(
                runner, self.loaded.vocab_size, memory.num_blocks, self.max_tokens, self.max_seqs
            )
        difference = output_difference(
            runner, self.loaded, memory.kv_config, memory.max_model_len, self.substitutes
        )
        return CheckedRunner(runner, multiple), difference

    def _row_multiple(self) -> int | None:
        """Rows to pad to, or None where there is no number that makes the model invariant."""
        model = self.loaded.model
        if self._rows_are_whole_vectors():
            return 1
        if self.threads > 2:
            make_activations_rowwise(model)
        multiple = find_row_multiple(
            model,
            self.substitutes.remaining() if self.substitutes else list(model.modules()),
            self.threads,
            self.max_tokens,
            self.max_seqs,
        )
        if multiple is not None:
            make_experts_rowwise(model, multiple)
        return multiple

    def _rows_are_whole_vectors(self) -> bool:
        """Whether torch computes nothing but the rotation of every position, and that in whole vectors.

        What is left at the end of a tensor it computes one by one, with other bits.
        """
        decoder = self.substitutes.decoder if self.substitutes else None
        if decoder is None or getattr(self.loaded.config, "final_logit_softcapping", None):
            return False
        return all(size % _LANES == 0 for size in decoder.preparation.rotary_sizes)


def _against_the_program(difference: float | None, limit: float) -> str | None:
    if difference is None:
        return "there is no room to check what they would compute as a program"
    return "they would compute something else as a program" if difference > limit else None
