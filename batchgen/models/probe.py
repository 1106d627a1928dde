"""Look at a loaded model once, with a few tokens, before anything is promised about it.

The probe runs one forward pass through a recording attention function. It yields what the KV cache
must hold per layer, or a refusal that says why this model cannot run on a paged cache. There is no
list of supported models: whatever passes the probe runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from batchgen.grammar import counted
from batchgen.models.forward_context import forward_context
from batchgen.models.layer_attention import LayerAttention
from batchgen.models.mask_probe import OwnMaskError, SeenMasks, seen_masks
from batchgen.models.refusals import refusal
from batchgen.types import UsageError
from batchgen_kernels.spec import AttentionSpec

PROBE_TOKENS = 3
KNOWN_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "dropout"})
HARMLESS_OPTIONS = frozenset(
    {"is_causal", "position_ids", "use_cache", "output_attentions", "cache_position"}
)


class _Recorder:
    """A forward context that notes shapes and options and returns finite values."""

    def __init__(self, masks: SeenMasks) -> None:
        self.masks = masks
        self.layers: dict[int, LayerAttention] = {}
        self.calls = 0
        # Kept until the end of the probe, so that no other tensor can come to lie where these are.
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        self.calls += 1
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise refusal("an attention module has no layer index")
        if query.shape[2] != key.shape[2]:
            raise refusal(f"layer {layer} attends to keys of another sequence (cross attention)")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise refusal(f"layer {layer} looks ahead (an encoder); it does not generate text")
        for name, given in options.items():
            if name not in KNOWN_OPTIONS | HARMLESS_OPTIONS and isinstance(given, torch.Tensor):
                raise refusal(f"layer {layer} passes `{name}` to attention, which batchgen does not know")
        self.layers[layer] = self._layer(layer, query, key, value, mask, options)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> LayerAttention:
        scaling = options.get("scaling")
        sinks = options.get("s_aux")
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            v_head_size=value.shape[3],
            scale=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
            sliding_window=self._window(layer, mask),
            softcap=options.get("softcap"),
            has_sinks=sinks is not None,
        )
        return LayerAttention(spec, sinks, self._source(layer, key, value))

    def _source(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> int | None:
        for source, (known_key, known_value) in self._stored.items():
            if _is_same(key, known_key) and _is_same(value, known_value):
                return source
        self._stored[layer] = key, value
        return None

    def _window(self, layer: int, mask: torch.Tensor | None) -> int | None:
        if mask is None:
            raise refusal(f"layer {layer} attends without a mask, so that it is not known what it may see")
        try:
            return self.masks.window(mask)
        except OwnMaskError as error:
            raise refusal(f"layer {layer} {error}") from error


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one and the same memory, read in the same way."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _one_row_of_logits(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The argument that asks for few logits, of a model that makes next-token logits."""
    takes = inspect.signature(model.forward).parameters
    return {"logits_to_keep": torch.tensor([0], device=model.device)} if "logits_to_keep" in takes else {}


def probe_model(model: PreTrainedModel) -> list[LayerAttention]:
    """Run `PROBE_TOKENS` tokens and return what each layer's attention needs, in layer order.

    Args:
        model: with batchgen's attention, which it has again afterwards.

    Raises:
        UsageError: the model cannot run on the paged cache; says why.
    """
    config = model.config.get_text_config()
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    ids = positions % config.vocab_size
    with seen_masks(model) as masks:
        recorder = _Recorder(masks)
        try:
            with torch.inference_mode(), forward_context(recorder):
                model(input_ids=ids, position_ids=positions, use_cache=False, **_one_row_of_logits(model))
        except UsageError:
            raise
        except Exception as error:
            raise refusal(f"a forward pass of {PROBE_TOKENS} tokens failed: {error}") from error
    if not recorder.calls:
        raise refusal(f"{type(model).__name__} does not dispatch through transformers' attention interface")
    layers = config.num_hidden_layers
    if sorted(recorder.layers) != list(range(layers)) or recorder.calls != layers:
        raise refusal(
            f"{len(recorder.layers)} of its {counted(layers, 'layer')} called attention, in "
            f"{counted(recorder.calls, 'call')}"
        )
    return [recorder.layers[i] for i in range(layers)]
