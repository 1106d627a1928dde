"""Models that cannot run on a paged cache, by what their configuration and transformers' code for them show.

Called before weights are fetched. Nothing here is a list of models: a kind is refused for a property, and
what no property shows is left to the load-time probe and the check after it.

As a program, `python -m batchgen.models.refusals FOLDER TASK`, it writes the refusal, or nothing, to standard
output: for `batchgen.models.fitness`, whose process may have no room for torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    GenerationMixin,
    PretrainedConfig,
)

from batchgen.types import Task, UsageError

CLASSIFIER = "ForSequenceClassification"
"""How transformers' names of classes with such a head end."""
DISPATCHER = "ALL_ATTENTION_FUNCTIONS"
"""What modules of transformers call attention by; one without it computes attention itself."""
PAGED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_OTHER_MODEL = "use a decoder-only model whose layers all attend over a KV cache"
_TRANSFORMERS = f"{_OTHER_MODEL}, or run this one with transformers' own generate"


_CLASSES: dict[Task, tuple[Any, str]] = {
    Task.EMBED: (MODEL_MAPPING, "model"),
    Task.CLASSIFY: (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "sequence classifier"),
}


def refusal(reason: str, remedy: str = _TRANSFORMERS) -> UsageError:
    """The error for a model that cannot run here: why, and what can be done instead."""
    return UsageError(f"model.path: this model cannot run on batchgen's paged cache: {reason}; {remedy}")


def refuse_config(config: PretrainedConfig, task: Task = Task.GENERATE) -> None:
    """Refuse what cannot work, without weights.

    Args:
        config: as the model's `config.json` gives it, nested configurations included.
        task: decides which head the model must have.

    Raises:
        UsageError: names the reason and what to do instead.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(f"{config.model_type} is an encoder-decoder (cross attention)")
    text: Any = config.get_text_config()
    if getattr(text, "cross_attention_layers", None) or getattr(text, "add_cross_attention", False):
        raise refusal(f"{config.model_type} has layers with cross attention")
    classes, what = _CLASSES.get(task, (MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model"))
    if type(config) not in classes:
        raise refusal(f"transformers has no {what} of type {config.model_type}", _OTHER_MODEL)
    _refuse_head(config.architectures or [], task)
    _refuse_class(classes[type(config)], text, text is config)


def _refuse_head(architectures: list[str], task: Task) -> None:
    """Refuse a task for which the weights, as what they were saved, have no head."""
    classifies = [name.endswith(CLASSIFIER) for name in architectures]
    if task is Task.CLASSIFY and classifies and not any(classifies):
        raise UsageError(
            f"task: classify needs a head for classes, and config.json says that the weights are those of "
            f"{' and '.join(architectures)}; use a model whose name there ends in {CLASSIFIER}, or "
            "another task"
        )
    if task not in _CLASSES and classifies and all(classifies):
        raise UsageError(
            f"task: {task} needs a head for the next token, and config.json says that the weights are those "
            f"of {' and '.join(architectures)}, which has one for classes; use task: classify, or another "
            "model"
        )


def _refuse_class(model: Any, config: Any, is_text_model: bool) -> None:
    """Refuse by the class of the model and its text configuration.

    A model of several parts may have its attention in another module, which the probe sees.
    """
    if getattr(model, "_is_stateful", False):
        raise refusal(
            f"{model.__name__} keeps a recurrent state, which blocks of keys and values do not hold"
        )
    if getattr(config, "index_topk", None):
        raise refusal(
            f"{model.__name__} attends to the {config.index_topk} keys that an indexer chooses "
            "(sparse attention)"
        )
    odd = set(getattr(config, "layer_types", None) or ()) - PAGED_LAYERS
    if odd:
        raise refusal(
            f"{model.__name__} has layers of type {', '.join(sorted(odd))}, and only full and sliding "
            "attention have a place in the cache"
        )
    code = vars(sys.modules[model.__module__])
    if any("alibi" in name.lower() for name in code) and getattr(config, "alibi", True):
        raise refusal(f"{model.__name__} adds ALiBi distances to its scores, in attention of its own")
    if is_text_model and DISPATCHER not in code:
        raise refusal(f"{model.__name__} does not dispatch through transformers' attention interface")
    if getattr(model, "generate", GenerationMixin.generate) is not GenerationMixin.generate:
        raise refusal(f"{model.__name__} does not generate a token at a time: it has a generate of its own")


def main(folder: str, task: str) -> None:
    """Write why a model cannot run, or nothing."""
    from batchgen.models.loader import load_config

    try:
        refuse_config(load_config(Path(folder)), Task(task))
    except UsageError as error:
        sys.stdout.write(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
