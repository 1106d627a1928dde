"""A model as two parts: the body, up to the final norm, and the head that makes logits of hidden states.

The runner computes a step with the whole model, whose head then sees only the rows that sample. Tasks that
read many positions take the body's hidden states of the same pass and give them to the head in pieces, so
that logits of a long prompt never lie in memory all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from batchgen.models.footprint import weight_bytes
from batchgen.models.forward_context import forward_context
from batchgen.types import Task, UsageError

_CHECKED_TOKENS = 3


def body_of(model: PreTrainedModel, task: Task) -> Any:
    """The part of a model that ends with the last norm."""
    if task in (Task.EMBED, Task.CLASSIFY):
        return model.base_model
    return model.get_decoder()  # type: ignore[no-untyped-call]


class ModelParts:
    """Runs a model's body once and its head as often as asked.

    Args:
        model: of any kind that `load_model` gives.
        task: for which it was loaded.

    Raises:
        UsageError: the head of a classifier is not one that works on single positions.
    """

    def __init__(self, model: PreTrainedModel, task: Task) -> None:
        self._model: Any = model
        self._causal = task not in (Task.EMBED, Task.CLASSIFY)
        self.body = body_of(model, task)
        self._dtype = model.dtype
        self._latest: Any = None
        self._replaying = False
        self._head = {Task.EMBED: _no_head, Task.CLASSIFY: self._classifier}.get(task, self._causal_head)
        self._hook = self.body.register_forward_hook(self._keep)
        if task is Task.CLASSIFY:
            self._check_classifier()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        """One pass over `(1, T)` ids and positions.

        Returns:
            `(R, V)` logits of the rows; `(0, 0)` where the model makes no next-token logits.
        """
        if self._causal:
            result = self._model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logits_rows
            )
            logits: torch.Tensor = result.logits[0]
            return logits
        self.body(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return torch.empty(0, 0, device=input_ids.device)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a token reads: all but the table that embeds it."""
        table = self._model.get_input_embeddings()
        return weight_bytes(module for module in self._model.modules() if module is not table)

    def products(self) -> Iterator[tuple[str, Any]]:
        """Modules with their names, of which some multiply with weights; `lm_head` is what makes logits."""
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            yield "lm_head" if module is head else name.rpartition(".")[2], module

    @property
    def hidden(self) -> torch.Tensor:
        """`(T, H)` hidden states after the final norm, of the latest pass."""
        states: torch.Tensor = self._latest.last_hidden_state[0]
        return states

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(R, V)` logits of `(R, H)` hidden states, by everything that the model does to make them."""
        return self._head(hidden.to(self._dtype))

    def close(self) -> None:
        """Let go of the model."""
        self._hook.remove()
        self._model = self.body = self._latest = None

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        if not self._replaying:
            self._latest = output

    def _causal_head(self, hidden: torch.Tensor) -> torch.Tensor:
        # The model's own forward pass knows what comes before and behind its output embedding (scales, soft
        # caps); it runs on a body that gives these hidden states.
        states = {**self._latest, "last_hidden_state": hidden.unsqueeze(0)}
        zeros = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with self._replay(type(self._latest)(**states)):
            result = self._model(input_ids=zeros, position_ids=zeros, use_cache=False, logits_to_keep=0)
        logits: torch.Tensor = result.logits[0]
        return logits

    @contextmanager
    def _replay(self, output: Any) -> Iterator[None]:
        given = self.body.__dict__.get("forward")
        self.body.forward = lambda *_, **__: output
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False
            if given is None:
                del self.body.forward
            else:
                self.body.forward = given

    def _classifier(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.score(hidden)
        return logits

    def _check_classifier(self) -> None:
        """Compare with the model's own forward pass, which pools the last token of a row."""
        name = type(self._model).__name__
        if not isinstance(getattr(self._model, "score", None), torch.nn.Module):
            raise UsageError(
                f"task: {name} has no head `score` on its last token; classify with another model"
            )
        pad = self._model.config.get_text_config().pad_token_id
        positions = torch.arange(_CHECKED_TOKENS, device=self._model.device).unsqueeze(0)
        ids = torch.tensor([[i for i in range(_CHECKED_TOKENS + 1) if i != pad][:_CHECKED_TOKENS]]).to(
            positions
        )
        with torch.inference_mode(), forward_context(_NoAttention()):
            theirs = self._model(input_ids=ids, position_ids=positions, use_cache=False)
            ours = self.head(self.hidden[-1:])
        if not torch.allclose(theirs.logits.float(), ours.float(), rtol=1e-3, atol=1e-3):
            raise UsageError(
                f"task: the head of {name} does more than score the last token's hidden state; "
                "classify with another model"
            )


class _NoAttention:
    """A forward context in which every position attends to itself alone."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        repeats = query.shape[1] // value.shape[1]
        return value.repeat_interleave(repeats, dim=1).transpose(1, 2)


def _no_head(hidden: torch.Tensor) -> torch.Tensor:
    raise TypeError("a model that was loaded for embeddings has no head")
