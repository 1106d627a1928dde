"""Find out at load time whether results depend on the batch, and pad so that they do not.

A GEMM library picks its kernel by the number of rows, so a row's bits may depend on how many rows
share the call. Measured with torch 2.13 and MKL: rows of `F.linear` are bit-identical for every
number of rows except where a thread gets fewer than 4, so padding each step to a multiple of
4 x threads rows makes float32 batch-invariant at almost no cost; in bfloat16 oneDNN gave every row the same
bits for every number of rows. Whether that holds on this machine, for this model's weight shapes, is checked
here rather than assumed: first each product by itself, then the whole model with its cache. Products of
our own (`batchgen.models.substitutes`) need neither the padding nor the check of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.room import INVARIANCE_TOKENS as CHECKED_TOKENS
from batchgen.engine.room import invariance_blocks
from batchgen.engine.runner import ModelRunner
from batchgen.models.activations import activation_modules
from batchgen.models.experts import expert_modules, expert_weights
from batchgen.types import Request, SamplingParams

ROWS_PER_THREAD = 4
STEP_MULTIPLES = (64, 128, 256)
"""Rows of the tiles that a GPU's products have."""
EVERY_SIZE, LONGEST_FILLER = 256, 250
CHECKED_MULTIPLES = (1, 2, 3, 4, 5, 8, 13, 16, 31, 32, 64)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, `(M, in_features)` to `(M, out_features)`, with the weight as `F.linear` takes it."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    is_head: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def distinct_products(model: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> list[Product]:
    """One product of each shape: linear layers, convolutions of width 1, routers and experts."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    seen: dict[tuple[Any, ...], Product] = {}
    for module in modules:
        for product in _products(module, is_head=module is head):
            shape = (*product.weight.shape, product.weight.stride(), product.bias is None, product.is_head)
            seen.setdefault(shape, product)
    return list(seen.values())


def _products(module: torch.nn.Module, *, is_head: bool) -> Iterator[Product]:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(module, Conv1D):
        yield Product(module.weight.T, module.bias)
    elif isinstance(module, torch.nn.Embedding):
        return
    elif isinstance(weight, torch.nn.Parameter) and weight.dim() == 2:
        yield Product(weight, bias, is_head)
    for experts in expert_modules(module) if hasattr(module, "_is_expert_parallel") else ():
        yield from map(Product, expert_weights(experts))


@torch.inference_mode()
def rows_are_independent(product: Product, multiple: int, max_rows: int) -> bool:
    """Whether rows keep their bits for every checked number of rows that is a multiple of `multiple`."""
    generator = torch.Generator().manual_seed(0)
    most = -(-max_rows // multiple)
    sizes = [multiple * k for k in {*CHECKED_MULTIPLES, most} if k <= most]
    weight = product.weight
    x = torch.randn(max(sizes), weight.shape[1], generator=generator).to(weight)
    whole = product(x)
    for rows in sizes:
        for offset in {0, max(sizes) - rows}:
            if not torch.equal(product(x[offset : offset + rows]), whole[offset : offset + rows]):
                return False
    return True


@torch.inference_mode()
def activations_are_independent(modules: Iterable[torch.nn.Module], multiple: int, max_rows: int) -> bool:
    """Whether activation functions give a row the same bits for every number of rows up to `max_rows`."""
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[str, int]] = set()
    for parent, _, activation in activation_modules(modules):
        for width, like in _inputs_of_activation(parent).items():
            if (repr(activation), width) in seen:
                continue
            seen.add((repr(activation), width))
            x = torch.randn(max_rows, width, generator=generator).to(like)
            whole = activation(x)
            sizes = range(multiple, max_rows, multiple)
            if not all(torch.equal(activation(x[:n]), whole[:n]) for n in sizes):
                return False
    return True


def _inputs_of_activation(parent: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Widths that an activation beside these layers may meet, and a tensor of the same dtype and device."""
    if hasattr(parent, "_is_expert_parallel"):
        *_, down = expert_weights(parent)
        return {down.shape[1]: down}
    layers = [layer for layer in parent.children() if isinstance(layer, torch.nn.Linear)]
    return {layer.out_features: layer.weight for layer in layers}


def find_row_multiple(
    model: torch.nn.Module,
    modules: Sequence[torch.nn.Module],
    threads: int,
    max_tokens: int,
    max_logits_rows: int,
) -> int | None:
    """The least number of rows whose multiples keep every row's bits, or None if none was found.

    Args:
        model: as a whole.
        modules: of the model; the others are known to keep every row's bits.
        threads: that share a product.
        max_tokens: most rows of a step.
        max_logits_rows: most of them that sample.
    """
    products = distinct_products(model, modules)
    for factor in (1, 2, 4):
        multiple = ROWS_PER_THREAD * threads * factor
        if all(
            rows_are_independent(p, multiple, max_logits_rows if p.is_head else max_tokens) for p in products
        ) and activations_are_independent(modules, multiple, max_tokens):
            return multiple
    return None


def find_step_multiple(
    runner: ModelRunner, vocab_size: int, num_blocks: int, max_tokens: int, max_seqs: int
) -> int | None:
    """As `find_row_multiple`, of a model as it runs on a GPU: whole steps of all sizes, which take it
    milliseconds.

    The runner pads to the result from now on. Uses its cache, so it must run before the first request.
    """
    if not _Watched.fits(runner, num_blocks, max_tokens):
        return None
    for multiple in (1, *STEP_MULTIPLES):
        runner.row_multiple = multiple
        watched = _Watched(runner, vocab_size, max_tokens)
        sizes = _step_sizes(multiple, max_tokens)
        if all(watched.same_among(size - 1, LONGEST_FILLER) for size in sizes) and all(
            # Of the last layer, and of the logits, there are as many rows as requests then.
            watched.same_among(size - 1, 1)
            for size in sizes
            if size <= max_seqs
        ):
            return multiple
    runner.row_multiple = 1
    return None


def captured_steps_are_independent(
    runner: ModelRunner, vocab_size: int, max_tokens: int, max_seqs: int, sizes: Sequence[int]
) -> bool:
    """Whether a token has the bits of a step of its prompt in each captured step as well, full and with the
    fewest rows that it is taken for.

    Args:
        runner: for which `find_step_multiple` has found a number, and which has captured steps since.
        vocab_size: of the model.
        max_tokens: most rows of a step.
        max_seqs: most requests in it.
        sizes: of what was captured, the largest first.
    """
    watched = _Watched(runner, vocab_size, max_tokens)
    fewest = (smaller + 1 for smaller in (*sizes[1:], 0))
    return all(watched.same_among(min(rows, max_seqs) - 1, 1) for rows in {*sizes, *fewest})


class _Watched:
    """The last token of a prompt, of which is known what a step of that prompt alone gives for it.

    Args:
        runner: its cache is written.
        vocab_size: of the model.
        max_tokens: most rows of a step.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, max_tokens: int) -> None:
        length, groups = min(CHECKED_TOKENS, max_tokens), len(runner.layout.groups)
        each = -(-length // runner.block_size)
        request = Request(0, [(7 + 13 * t) % vocab_size for t in range(length)], SamplingParams(max_tokens=1))
        blocks = [list(range(1 + group * each, 1 + (group + 1) * each)) for group in range(groups)]
        self._runner = runner
        self._groups, self._free_block = groups, groups * each + 1
        self._vocab_size = vocab_size
        self._truth = _last_row(runner, [_scheduled(request, 0, length, blocks)]).clone()
        self._own = _scheduled(request, length - 1, length, blocks)

    @staticmethod
    def fits(runner: ModelRunner, num_blocks: int, max_tokens: int) -> bool:
        """Whether a cache of so many blocks has room for it, and for others."""
        each = -(-min(CHECKED_TOKENS, max_tokens) // runner.block_size)
        return num_blocks >= len(runner.layout.groups) * each + 2

    def same_among(self, others: int, longest: int) -> bool:
        """Whether it has the same bits in a step with so many other tokens, in sequences up to `longest`."""
        block_size = self._runner.block_size
        fillers = _fillers(others, longest, self._free_block, self._groups, self._vocab_size, block_size)
        return torch.equal(_last_row(self._runner, [self._own, *fillers]), self._truth)


def _step_sizes(multiple: int, most: int) -> list[int]:
    """Every number of rows after padding up to a few hundred, and further on at least every sixteenth."""
    sizes = range(multiple, most + multiple, multiple)
    return [min(n, most) for n in sizes if n <= EVERY_SIZE or n % max(multiple, 16) == 0 or n >= most]


def _fillers(
    tokens: int, longest: int, block: int, groups: int, vocab_size: int, block_size: int
) -> list[ScheduledRequest]:
    """Sequences with so many tokens, of one and of up to `longest`; what they leave in `block` is nothing."""
    fillers: list[ScheduledRequest] = []
    while tokens:
        length = min(tokens, 1 if len(fillers) % 2 else longest)
        request = Request(1 + len(fillers), [5 % vocab_size] * length, SamplingParams(max_tokens=1))
        own = [[block] * -(-length // block_size)] * groups
        fillers.append(_scheduled(request, 0, length, own))
        tokens -= length
    return fillers


def _scheduled(request: Request, start: int, stop: int, blocks: list[list[int]]) -> ScheduledRequest:
    return ScheduledRequest(
        request=request, start=start, num_tokens=stop - start, samples=True, block_ids=blocks
    )


def _last_row(runner: ModelRunner, scheduled: Iterable[ScheduledRequest]) -> torch.Tensor:
    """What a step gives for its first request: logits, or the hidden state where a model makes none."""
    parts = list(scheduled)
    total = sum(p.num_tokens for p in parts)
    logits = runner.execute(SchedulerOutput(scheduled=parts, total_tokens=total, copies=[], preempted=[]))
    return logits[0] if len(logits) else runner.hidden[parts[0].num_tokens - 1].clone()


def model_is_invariant(runner: ModelRunner, vocab_size: int, num_blocks: int) -> bool:
    """Whether one sequence gives the same bits whole and alone, and in chunks among others.

    Uses the runner's own cache, so it must run before the first request.
    """
    tokens, groups = CHECKED_TOKENS, len(runner.layout.groups)
    per_group = -(-tokens // runner.block_size)
    if num_blocks < invariance_blocks(runner.block_size, groups):
        return False

    def request(i: int) -> Request:
        ids = [(7 + 31 * i + 13 * t) % vocab_size for t in range(tokens)]
        return Request(request_id=i, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1))

    def blocks(i: int) -> list[list[int]]:
        firsts = [1 + (i * groups + group) * per_group for group in range(groups)]
        return [list(range(first, first + per_group)) for first in firsts]

    whole = _last_row(runner, [_scheduled(request(0), 0, tokens, blocks(0))])
    _last_row(runner, [_scheduled(request(0), 0, 5, blocks(1)), _scheduled(request(1), 0, 30, blocks(2))])
    _last_row(runner, [_scheduled(request(1), 30, 31, blocks(2)), _scheduled(request(0), 5, 22, blocks(1))])
    mixed = _last_row(
        runner, [_scheduled(request(0), 22, tokens, blocks(1)), _scheduled(request(1), 31, 32, blocks(2))]
    )
    return torch.equal(whole, mixed)
