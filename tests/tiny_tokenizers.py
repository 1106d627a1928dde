"""Small tokenizers of the kinds that models have, made in memory, for the tests of `batchgen.text`."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from batchgen.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% elif m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE as GPT-2 and Qwen have it, with ChatML turns; nothing is added to plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("o", "r"),
        ("Ġw", "or"),
        ("i", "m"),
    ]
    pieces = [*alphabet, *(a + b for a, b in merges)]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return _wrap(backend, CHATML, bos_token="<|endoftext|>", eos_token="<|im_end|>")


@cache
def byte_fallback(model: str = "bpe") -> Tokenizer:
    """SentencePiece as Llama 2 has it: spaces as `▁`, unknown characters as byte tokens, BOS first.

    Args:
        model: `bpe` or `unigram`.
    """
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "s",
        "<",
        ">",
        "/",
        "▁h",
        "▁w",
        "ll",
        "�",
        "ab",
        "a",
        "b",
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    if model == "unigram":
        backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, True))
    else:
        vocab = {piece: i for i, piece in enumerate(pieces)}
        merges = [("▁", "h"), ("▁", "w"), ("l", "l"), ("a", "b")]
        backend = Backend(
            models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrap(backend, INST, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def metaspace() -> Tokenizer:
    """A Metaspace tokenizer that puts the leading space before the first piece only."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁a", "a", "b", "▁b", "ab", "<", "s", ">", "c", "�"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _wrap(backend, None, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


ALL = (byte_level, byte_fallback, lambda: byte_fallback("unigram"), metaspace)


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    """The same tokenizer with another chat template."""
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        bos_token=tokenizer.hf.bos_token,
        eos_token=tokenizer.hf.eos_token,
    )
    hf.chat_template = template
    return Tokenizer(hf)


def _wrap(backend: Backend, template: str | None, **special: str) -> Tokenizer:
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    hf.chat_template = template
    return Tokenizer(hf)
