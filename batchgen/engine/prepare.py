"""Take from a model that was loaded and checked what it computes with, if that is all that it does.

For `batchgen.engine.prepared`, which keeps it. Tried on numbers: the model, and what would be kept of it,
must give the same bits for every token, every position, and steps of many sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.room import INVARIANCE_TOKENS
from batchgen.engine.runner import ModelRunner
from batchgen.models.prepared import PreparedParts, PreparedWeights, Rotation
from batchgen.types import Request, SamplingParams, Task
from batchgen_kernels.cpu.decoder import DecoderWeights
from batchgen_kernels.cpu.linear import PackedWeights

if TYPE_CHECKING:
    from batchgen.engine.materials import Materials

_STEPS = (1, 2, 3, 5, 8, 17, INVARIANCE_TOKENS)
_SIZES = (1, 2, 3, 7, 8, 16, 33)
_CHUNK = 4096


@torch.inference_mode()
def prepare(materials: Materials, runner: ModelRunner) -> PreparedWeights | None:
    """What is to be kept of a model; None where it does more than a prepared model would.

    Args:
        materials: of a model whose layers are settled.
        runner: of the model, checked; its cache is written.
    """
    loaded, decoder = materials.loaded, materials.decoder
    if not isinstance(decoder, DecoderWeights) or loaded.task is Task.CLASSIFY:
        return None
    body: Any = runner.parts.body  # type: ignore[union-attr]
    frequencies = getattr(body.rotary_emb, "inv_freq", None)
    scaling = getattr(body.rotary_emb, "attention_scaling", None)
    head = None if loaded.task is Task.EMBED else _head(loaded.model)
    if frequencies is None or scaling is None or (head is None) != (loaded.task is Task.EMBED):
        return None
    weights = PreparedWeights(
        embedding=body.embed_tokens.weight,
        rotation=Rotation(frequencies, float(scaling)),
        decoder=decoder,
        head=head,
        layers=materials.layers,
        task=loaded.task,
        eos_token_ids=loaded.eos_token_ids,
        generation=loaded.generation,
        context=loaded.context,
        longest=loaded.longest,
    )
    same = (
        _embeds_the_same(body, weights)
        and _rotates_the_same(body, weights, materials.max_tokens)
        and _computes_the_same(runner, weights, loaded.vocab_size)
    )
    return weights if same else None


def _head(model: Any) -> PackedWeights | None:
    weights = getattr(model.get_output_embeddings(), "weights", None)
    return weights if isinstance(weights, PackedWeights) else None


def _embeds_the_same(body: Any, weights: PreparedWeights) -> bool:
    every = torch.arange(len(weights.embedding))
    ids = (every[i : i + _CHUNK] for i in range(0, len(every), _CHUNK))
    return all(torch.equal(body.embed_tokens(some), F.embedding(some, weights.embedding)) for some in ids)


def _rotates_the_same(body: Any, weights: PreparedWeights, max_tokens: int) -> bool:
    every = torch.arange(weights.longest)
    mixed = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
    steps = [
        *(every[i : i + max_tokens] for i in range(0, len(every), max_tokens)),
        *(mixed[:size] for size in _SIZES),
    ]
    width = weights.embedding.shape[1]
    for positions in steps:
        theirs = body.rotary_emb(torch.zeros(1, len(positions), width), positions.unsqueeze(0))
        ours = weights.rotation(positions)
        if not all(torch.equal(a[0], b) for a, b in zip(theirs, ours, strict=True)):
            return False
    return True


def _computes_the_same(runner: ModelRunner, weights: PreparedWeights, vocab_size: int) -> bool:
    loaded, prepared = runner.parts, PreparedParts(weights)
    try:
        for tokens in _STEPS:
            runner.parts = loaded
            theirs = _results(runner, tokens, vocab_size)
            runner.parts = prepared
            ours = _results(runner, tokens, vocab_size)
            if not all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)):
                return False
    finally:
        runner.parts = loaded
        prepared.close()
    return True


def _results(runner: ModelRunner, tokens: int, vocab_size: int) -> list[torch.Tensor]:
    """Logits of the last token, hidden states, and logits of some of them, of one sequence."""
    ids = [(5 + 29 * t + 3 * t * t) % vocab_size for t in range(tokens)]
    per_group = -(-tokens // runner.block_size)
    blocks = [
        list(range(1 + group * per_group, 1 + (group + 1) * per_group))
        for group in range(len(runner.layout.groups))
    ]
    request = Request(request_id=0, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1))
    scheduled = ScheduledRequest(request, 0, tokens, samples=True, block_ids=blocks)
    planned = SchedulerOutput(scheduled=[scheduled], total_tokens=tokens, copies=[], preempted=[])
    logits = runner.execute(planned, whole=True)
    hidden = runner.hidden.clone()
    if not logits.numel():
        return [hidden]
    return [logits, hidden, *(runner.head(hidden[:size]) for size in (1, 3, tokens))]
