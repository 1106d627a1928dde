"""Check at load time that a model computes here what it computes in transformers.

The probe finds what a model asks of attention. Whatever else may depend on how a batch is packed (a state,
positions counted from a mask, an attention of its own beside the one it dispatches) shows in the output only:
so one short sequence is computed in pieces, beside another, and compared with one whole forward pass of the
same model with transformers' eager attention.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from batchgen.core.kv_spec import KVCacheConfig
from batchgen.core.scheduler import Scheduler, SchedulerConfig
from batchgen.engine.room import OUTPUT_CHUNK as CHUNK
from batchgen.engine.room import OUTPUT_TOKENS as TOKENS
from batchgen.engine.room import has_room_for_output
from batchgen.engine.runner import ModelRunner
from batchgen.models.attention import ATTENTION_NAME
from batchgen.models.loader import LoadedModel
from batchgen.models.refusals import refusal
from batchgen.types import Request, SamplingParams, UsageError

if TYPE_CHECKING:
    from batchgen.models.fused import Fusion

FORCED = 2
"""Of the tokens, how many are computed one at a time, as if they had been sampled."""
EXACT, ROUNDED = 1e-3, 0.7
"""How large the difference may be, as a share of the standard deviation: in float32, and where weights or the
cache are coarser. Two unrelated outputs differ by 1.4."""


def output_difference(
    runner: ModelRunner,
    loaded: LoadedModel,
    kv_config: KVCacheConfig,
    max_model_len: int,
    substitutes: Fusion[Any] | None,
) -> float | None:
    """How much the hidden states of a few tokens differ from those that transformers computes.

    Uses the runner's cache, so it must run before the first request.

    Returns:
        Root mean square over the standard deviation; None where there is no room to find it out.

    Raises:
        UsageError: they cannot be computed.
    """
    if not has_room_for_output(kv_config, max_model_len):
        return None
    ids = [(11 + 37 * t + 5 * t * t) % loaded.vocab_size for t in range(TOKENS)]
    try:
        with substitutes.suspended() if substitutes else nullcontext():
            theirs = _whole(runner, loaded, ids)
        ours = _in_pieces(runner, kv_config, ids)
    except Exception as error:
        raise refusal(f"a forward pass of {TOKENS} tokens failed: {error}") from error
    return _relative(ours, theirs)


def check_difference(difference: float | None, limit: float, quantization: str | None = None) -> None:
    """Refuse a model whose output differs by more than `limit`.

    Raises:
        UsageError: it does; says that it may be for its quantisation, where there is one.
    """
    if difference is not None and difference > limit:
        if quantization is not None:
            raise UsageError(
                f"model.quantization: with {quantization} this model's output differs from what transformers "
                f"computes in float32 by {difference:.2g} of the standard deviation, and {limit} is allowed; "
                "leave model.quantization out"
            )
        raise refusal(
            "what it computes in pieces among other rows differs from what transformers computes, by "
            f"{difference:.2g} of the standard deviation"
        )


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Root mean square of the difference over the standard deviation; 0 where the truth is not finite."""
    if not theirs.isfinite().all():
        return 0.0
    return float((ours - theirs).square().mean().sqrt() / theirs.std())


@torch.inference_mode()
def _whole(runner: ModelRunner, loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Float32 hidden states `(len(ids), H)` by transformers' eager attention and masks."""
    loaded.model.set_attn_implementation("eager")
    try:
        place = runner.device.place
        positions = torch.arange(len(ids), device=place).unsqueeze(0)
        runner.parts.forward(torch.tensor([ids]).to(place), positions, torch.tensor([0]).to(place))
    finally:
        loaded.model.set_attn_implementation(ATTENTION_NAME)
    return runner.hidden.float()


def _in_pieces(runner: ModelRunner, kv_config: KVCacheConfig, ids: list[int]) -> torch.Tensor:
    """Float32 hidden states `(len(ids), H)`, computed in chunks beside another row."""
    limits = SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=2, max_model_len=TOKENS + 1)
    scheduler = Scheduler(limits, kv_config)
    for row, prompt in enumerate((ids[: -FORCED - 1 : 2], ids[:-FORCED])):
        scheduler.add(Request(row, list(prompt), SamplingParams(max_tokens=FORCED + 1)))
    states: list[torch.Tensor] = []
    while sum(map(len, states)) < len(ids):
        planned = scheduler.schedule()
        runner.execute(planned, whole=True)
        end = 0
        for s in planned.scheduled:
            end += s.num_tokens
            if s.request.request_id == 1:
                states.append(runner.hidden[end - s.num_tokens : end].float())
        samplers = [s.request for s in planned.scheduled if s.samples]
        scheduler.update(planned, {r.request_id: ids[r.num_tokens % TOKENS] for r in samplers})
    return torch.cat(states)
