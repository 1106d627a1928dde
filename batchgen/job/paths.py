"""Make the paths of a job absolute, each against the folder of the file it stands in. Used by `load_job`."""

from __future__ import annotations

import os.path
import re
from pathlib import Path

from batchgen.data.urls import is_url, protocol
from batchgen.job.document import Document
from batchgen.job.faults import KeyPath, show_value
from batchgen.job.object_store import PROTOCOLS
from batchgen.job.spec.input import InputSpec
from batchgen.job.spec.model import ModelSpec
from batchgen.job.spec.output import OutputSpec
from batchgen.job.spec.prompt import PromptSection
from batchgen.job.spec.section import Section

_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}")


def resolve_paths(document: Document, sections: dict[str, Section]) -> None:
    """Replace paths in `sections` in place; what cannot be resolved becomes a fault of the document."""
    model, given, prompt, output = (sections[name] for name in ("model", "input", "prompt", "output"))
    if isinstance(model, ModelSpec):
        _refuse_nul(document, ("model", "tokenizer"), model.tokenizer or "")
        tokenizer = _maybe_local(model.tokenizer, document.folder(("model", "tokenizer")))
        sections["model"] = _replace(model, path=_model(document, model.path), tokenizer=tokenizer)
    if isinstance(given, InputSpec):
        paths = tuple(_input(document, ("input", "path", i), p) for i, p in enumerate(given.path))
        sections["input"] = _replace(given, path=paths)
    if isinstance(output, OutputSpec):
        sections["output"] = _replace(output, path=_output(document, output.path))
    if isinstance(prompt, PromptSection) and prompt.chat_template is not None:
        text = _template(document, prompt.chat_template)
        sections["prompt"] = _replace(prompt, chat_template=text)


def _replace(section: Section, **changes: object) -> Section:
    return section.model_copy(update=changes)


def _absolute(text: str, base: Path) -> str:
    return os.path.abspath(base / os.path.expanduser(text))


def _input(document: Document, path: KeyPath, text: str) -> str:
    _refuse_nul(document, path, text)
    return text if is_url(text) else _absolute(text, document.folder(path))


def _refuse_nul(document: Document, path: KeyPath, text: str) -> None:
    if "\0" in text:
        key = ".".join(str(name) for name in path if isinstance(name, str))
        document.fault(path, f"{key}: {show_value(text)} holds a zero byte, which no path has; take it out")


def _output(document: Document, text: str) -> str:
    _refuse_nul(document, ("output", "path"), text)
    if not is_url(text):
        return _absolute(text, document.folder(("output", "path")))
    if protocol(text) not in PROTOCOLS:
        known = ", ".join(f"{name}://" for name in PROTOCOLS)
        document.fault(
            ("output", "path"),
            f"output.path: {show_value(text)}: results cannot be written there; use a local folder or one of "
            f"{known}",
        )
    elif not text.partition("://")[2].partition("/")[0]:
        document.fault(
            ("output", "path"),
            f"output.path: {show_value(text)} names no bucket; write one, such as "
            f"{protocol(text)}://bucket/results",
        )
    return text


def _model(document: Document, text: str) -> str:
    _refuse_nul(document, ("model", "path"), text)
    if "://" in text:
        document.fault(
            ("model", "path"),
            f"model.path: {show_value(text)} is not available in this version; "
            "use a hub id such as org/name, a local folder, or a .gguf file",
        )
    return _maybe_local(text, document.folder(("model", "path"))) or text


def _maybe_local(text: str | None, base: Path) -> str | None:
    """A folder or file if it looks like one or is there, else a hub id, left alone."""
    if text is None:
        return None
    looks_local = text.startswith((".", "/", "~")) or text.endswith((".gguf", "/"))
    return _absolute(text, base) if looks_local or os.path.exists(base / text) else text


def _template(document: Document, text: str) -> str:
    """The template's text: as given where it has a brace or a line break, else read from that file.

    Where there is no such file it may be the name of one of the tokenizer's own templates, which is not known
    here.
    """
    if "{" in text or "\n" in text:
        return text
    file = Path(_absolute(text, document.folder(("prompt", "chat_template"))))
    if _TEMPLATE_NAME.fullmatch(text) and not file.exists():
        return text
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8, or its name is none"
        document.fault(
            ("prompt", "chat_template"),
            f"prompt.chat_template: the file {show_value(text)} cannot be read ({why}); "
            "give a readable file, the template itself, or the name of one of the tokenizer's own",
        )
        return text
