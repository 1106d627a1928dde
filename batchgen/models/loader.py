"""Load a language model so that its attention runs on our cache.

Called by the engine worker and by `LLM`. Models are transformers' own definitions; only their
attention function is ours.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from batchgen.grammar import counted
from batchgen.models.attention import ATTENTION_NAME, register_attention
from batchgen.models.dtypes import DTYPES
from batchgen.models.dummy import SEED
from batchgen.models.dummy_weights import make_model
from batchgen.models.parts import ModelParts
from batchgen.models.rope import longest_sequence
from batchgen.models.source import CONTEXT_LENGTHS
from batchgen.types import Task, UsageError

_LOADERS: dict[Task, Any] = {
    Task.EMBED: AutoModel,
    Task.CLASSIFY: AutoModelForSequenceClassification,
}
_HOST = torch.device("cpu")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, with the head for a task, and what its files say about generation."""

    model: PreTrainedModel
    generation_config: GenerationConfig
    dtype: torch.dtype
    task: Task = Task.GENERATE

    @property
    def config(self) -> PretrainedConfig:
        """The model's own configuration."""
        return self.model.config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence, by the generation configuration, else the model's."""
        given = self.generation_config.eos_token_id
        if given is None:
            given = self.config.eos_token_id
        ids = given if isinstance(given, (list, tuple)) else () if given is None else (given,)
        return tuple(int(i) for i in ids if 0 <= i < self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: every token id must be below it."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def generation(self) -> dict[str, Any]:
        """The generation configuration."""
        return self.generation_config.to_dict()

    @property
    def context(self) -> int:
        """The longest sequence the model was made for. Raises UsageError: its configuration does not say."""
        return context_length(self.config)

    @property
    def longest(self) -> int:
        """The most tokens that `model.max_model_len` may ask for."""
        return longest_sequence(self.config, self.context)

    def parts(self) -> ModelParts:
        """What runs it."""
        return ModelParts(self.model, self.task)


def context_length(config: PretrainedConfig) -> int:
    """The longest sequence the model was made for.

    Raises:
        UsageError: the configuration does not say.
    """
    config = config.get_text_config()
    for name in CONTEXT_LENGTHS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UsageError("model.max_model_len: the model's configuration gives no context length; set it")


def load_config(folder: Path) -> PretrainedConfig:
    """Read `config.json` without weights.

    Raises:
        UsageError: it is missing, broken, or of a kind that transformers does not know.
    """
    try:
        # Left open, transformers would ask on the terminal whether to run code from the folder.
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    # A value of a wrong type is an error of a kind of its own in each version of transformers.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"model.path: {folder} needs code of its own, which is never run; "
                "choose a model that transformers itself defines"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"model.path: {folder} has no usable configuration ({reason}); "
            "is it a model folder of transformers, and is transformers new enough for it?"
        ) from error
    return config


def task_of(folder: Path) -> Task:
    """What the weights in a folder have a head for: the next token, classes, or nothing (`embed`)."""
    names = load_config(folder).architectures or []
    if any(name.endswith("ForSequenceClassification") for name in names):
        return Task.CLASSIFY
    return Task.EMBED if names and all(name.endswith("Model") for name in names) else Task.GENERATE


def load_model(
    folder: Path,
    dtype: str = "float32",
    *,
    allow_pickle: bool = False,
    task: Task = Task.GENERATE,
    place: torch.device = _HOST,
) -> LoadedModel:
    """Load weights for inference, or make them where the configuration is a dummy's.

    Args:
        folder: as `ModelSource.weights_folder` gives it.
        dtype: `float32`, `bfloat16` or `float16`.
        allow_pickle: load `.bin` files where there are no safetensors; only tensors are read of them.
        task: `embed` leaves the head out, `classify` wants one for sequence classification, and all others
            one for the next token.
        place: the device that gets the weights, which go there one by one from mapped files.

    Raises:
        UsageError: no safetensors weights, weights that do not belong to the configuration, or no
            language model with the head that the task needs.
    """
    register_attention()
    config = load_config(folder)
    kind = _LOADERS.get(task, AutoModelForCausalLM)
    if hasattr(config, SEED):
        return _made(kind, config, folder, DTYPES[dtype], task, place)
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
        )
    except Exception as error:
        if "ignore_mismatched_sizes" in str(error):
            raise UsageError(
                f"model.path: {folder} holds weights of other shapes than its config.json describes, so they "
                "belong to different models; download both again"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"model.path: {folder} could not be loaded ({type(error).__name__}: {reason}); "
            "are its weights safetensors, and does its architecture use transformers' attention interface?"
        ) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UsageError(
            f"model.path: {folder} lacks {counted(len(missing), 'weight')} that its configuration asks for, "
            f"such as {missing[0]}; download it again"
        )
    if info["unexpected_keys"]:
        logger.warning("%d weights of %s are not used by the model", len(info["unexpected_keys"]), folder)
    model.eval().to(place)
    # A model without a next-token head has none.
    generation_config = getattr(model, "generation_config", None) or GenerationConfig()  # type: ignore[no-untyped-call]
    return LoadedModel(model, generation_config, DTYPES[dtype], task)


def _made(
    kind: Any, config: PretrainedConfig, folder: Path, dtype: torch.dtype, task: Task, place: torch.device
) -> LoadedModel:
    """A dummy of the given kind."""
    try:
        model = make_model(kind, config, getattr(config, SEED), dtype, place, ATTENTION_NAME)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"model.path: no weights can be made for {folder / 'config.json'} ({reason}); choose a smaller "
            "shape, or other numbers behind its name, such as dummy:NAME?num_hidden_layers=4"
        ) from error
    return LoadedModel(model, model.generation_config or GenerationConfig(), dtype, task)  # type: ignore[no-untyped-call]
