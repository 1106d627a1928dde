"""Look at a loaded model once, with a few tokens, before anything is promised about it.

The probe runs one forward pass through a recording attention function. It yields what the KV cache
must hold per layer, or a refusal that says why this model cannot run on a paged cache. There is no
list of supported models: whatever passes the probe runs.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from batchgen.models.forward_context import forward_context
from batchgen.types import UsageError
from batchgen_kernels.spec import AttentionSpec

PROBE_TOKENS = 3
HARMLESS_OPTIONS = frozenset(
    {"is_causal", "position_ids", "use_cache", "output_attentions", "cache_position"}
)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer's attention needs.

    Args:
        spec: its shape and arithmetic.
        sinks: its learned extra logits, `(num_heads,)`.
        source: the earlier layer whose keys and values it is handed, if it has none of its own.
    """

    spec: AttentionSpec
    sinks: torch.Tensor | None = None
    source: int | None = None


class _Recorder:
    """A forward context that notes shapes and options and returns finite values."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config.get_text_config()
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
        **options: Any,
    ) -> torch.Tensor:
        self.calls += 1
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise _refusal("an attention module has no layer index")
        if query.shape[2] != key.shape[2]:
            raise _refusal(f"layer {layer} attends to keys of another sequence (cross attention)")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise _refusal(f"layer {layer} looks ahead (an encoder); it does not generate text")
        self.layers[layer] = self._layer(layer, query, key, value, options)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> LayerAttention:
        known = {"scaling", "sliding_window", "softcap", "s_aux", "dropout"}
        for name, given in options.items():
            if name not in known and name not in HARMLESS_OPTIONS and isinstance(given, torch.Tensor):
                raise _refusal(f"layer {layer} passes `{name}` to attention, which batchgen does not know")
        scaling = options.get("scaling")
        sinks = options.get("s_aux")
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            v_head_size=value.shape[3],
            scale=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
            sliding_window=_window(self.config, layer, options.get("sliding_window")),
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


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one and the same memory, read in the same way."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _refusal(reason: str) -> UsageError:
    return UsageError(f"model: this model cannot run on batchgen's paged cache: {reason}")


def _window(config: PretrainedConfig, layer: int, given: int | None) -> int | None:
    """The layer's window by the configuration; `layer_types` wins over a lone `sliding_window`.

    Some models build a window into their mask without passing it to attention, others carry a
    window in the configuration that no layer uses, so neither source is trusted alone.
    """
    types = getattr(config, "layer_types", None)
    if types is None:
        hidden = getattr(config, "sliding_window", None)
        if given is None and hidden and getattr(config, "use_sliding_window", True):
            raise _refusal(
                f"its configuration has a window of {hidden} that layer {layer} does not pass to attention"
            )
        return given
    expected = config.sliding_window if types[layer] == "sliding_attention" else None
    if given != expected and given is not None:
        raise _refusal(
            f"layer {layer} asks for a window of {given}, its configuration says {expected or 'none'}"
        )
    return expected


def refuse_unsupported(model: PreTrainedModel, max_model_len: int) -> None:
    """Refuse what cannot work, before a forward pass is tried.

    Raises:
        UsageError: names the reason and, where there is one, the remedy.
    """
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal("it is an encoder-decoder (cross attention)")
    if getattr(model, "_is_stateful", False):
        raise _refusal("it keeps a recurrent state that a KV cache does not hold")
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        raise _refusal(f"it has layers of type {', '.join(sorted(odd))}")
    _refuse_rope(config, max_model_len)


def _refuse_rope(config: PretrainedConfig, max_model_len: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [v for v in rope.values() if isinstance(v, dict)]
    for parameters in by_layer_type or [rope]:
        kind = parameters.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_model_len > original:
            raise _refusal(
                f"its {kind} rope changes with the longest sequence of a batch beyond {original} tokens; "
                f"set model.max_model_len to {original} or less"
            )


def _one_row_of_logits(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The argument that asks for few logits, of a model that makes next-token logits."""
    takes = inspect.signature(model.forward).parameters
    return {"logits_to_keep": torch.tensor([0])} if "logits_to_keep" in takes else {}


def probe_model(model: PreTrainedModel, max_model_len: int) -> list[LayerAttention]:
    """Run `PROBE_TOKENS` tokens and return what each layer's attention needs, in layer order.

    Raises:
        UsageError: the model cannot run on the paged cache; says why.
    """
    refuse_unsupported(model, max_model_len)
    recorder = _Recorder(model.config)
    config = model.config.get_text_config()
    ids = torch.arange(PROBE_TOKENS).unsqueeze(0) % config.vocab_size
    positions = torch.arange(PROBE_TOKENS).unsqueeze(0)
    try:
        with torch.inference_mode(), forward_context(recorder):
            model(input_ids=ids, position_ids=positions, use_cache=False, **_one_row_of_logits(model))
    except UsageError:
        raise
    except Exception as error:
        raise _refusal(f"a forward pass of {PROBE_TOKENS} tokens failed: {error}") from error
    layers = config.num_hidden_layers
    if not recorder.calls:
        raise _refusal(f"{type(model).__name__} does not dispatch through transformers' attention interface")
    if sorted(recorder.layers) != list(range(layers)) or recorder.calls != layers:
        raise _refusal(
            f"{len(recorder.layers)} of its {layers} layers call attention, in {recorder.calls} calls"
        )
    return [recorder.layers[i] for i in range(layers)]
