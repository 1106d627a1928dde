"""`sampling` of a job file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import COUNT, Count, Text, Texts, TokenId, TokenIds
from batchgen.types import MOST_LOGPROBS


class ReasoningSpec(Section):
    """What a model writes before its answer, between two marks, gets a column of its own."""

    start: Annotated[Text, Rule("the mark as the model writes it")] = "<think>"
    end: Annotated[Text, Rule("the mark as the model writes it")] = "</think>"
    column: Annotated[Text, Rule("a name for the column")] = "reasoning"


class SamplingSection(Section):
    """How each row is decoded; null takes the model's own default, else the neutral value."""

    temperature: Annotated[
        Annotated[float, Field(ge=0)] | None, Rule("null, 0 (greedy) or a larger number")
    ] = None
    top_p: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None, Rule("null or a number above 0 and up to 1")
    ] = None
    top_k: Annotated[Annotated[int, Field(ge=0)] | None, Rule("null, 0 (off) or a positive whole number")] = (
        None
    )
    min_p: Annotated[Annotated[float, Field(ge=0, le=1)] | None, Rule("null or a number from 0 to 1")] = None
    max_tokens: Annotated[Count, Rule(COUNT)] = 256
    min_tokens: Annotated[int, Field(ge=0), Rule("a whole number from 0 to max_tokens")] = 0
    n: Annotated[Count, Rule(COUNT)] = 1
    stop: Annotated[Texts, Rule("a list of non-empty strings")] = ()
    stop_token_ids: Annotated[TokenIds, Rule("a list of token ids of 0 or more")] = ()
    seed: Annotated[int, Field(ge=0, lt=2**63), Rule("a whole number from 0 to 2**63 - 1")] = 0
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None,
        Rule(f"null or a number from 0 to {MOST_LOGPROBS}"),
    ] = None
    presence_penalty: Annotated[Annotated[float, Field(ge=-2, le=2)], Rule("a number from -2 to 2")] = 0.0
    frequency_penalty: Annotated[Annotated[float, Field(ge=-2, le=2)], Rule("a number from -2 to 2")] = 0.0
    repetition_penalty: Annotated[
        Annotated[float, Field(gt=0)] | None, Rule("null or a number above 0, 1 for none")
    ] = None
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
        Rule("a map from token ids to numbers from -100 to 100, such as {50256: -100}"),
    ] = Field(default_factory=dict)
    bad_words: Annotated[Texts, Rule("a list of non-empty strings")] = ()
    allowed_token_ids: Annotated[TokenIds, Rule("a list of token ids of 0 or more; empty for all")] = ()
    ignore_eos: Annotated[bool, Rule("true or false")] = False
    prompt_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None,
        Rule(f"null or a whole number from 0 to {MOST_LOGPROBS}"),
    ] = None
    per_row: Annotated[Text | None, Rule("null or the name of a column")] = None
    reasoning: Annotated[
        ReasoningSpec | None, Rule("null or a map of start, end and column, each a text that is not empty")
    ] = None
    turns: Annotated[Text | None, Rule("null or the name of a column")] = None

    @property
    def reasoning_column(self) -> str | None:
        """Of the output; None where nothing is split off."""
        return None if self.reasoning is None else self.reasoning.column
