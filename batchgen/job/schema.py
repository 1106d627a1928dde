"""JSON Schema of the job file, made from its sections, so that editors complete and check it. For `schema`.

Draft 2020-12 (https://json-schema.org/draft/2020-12/schema). What the schema cannot say (two keys that
exclude each other, files that must exist) is found by `validate`; what it refuses, `validate` refuses too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.job.include import INCLUDE, SHORTHAND
from batchgen.job.spec.job import REQUIRED, SECTIONS, TopSpec
from batchgen.job.spec.section import Rule, Section
from batchgen.job.unavailable import MEANS_OFF

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_ENVIRONMENT = "environment"
_TEXT = {"type": "string", "minLength": 1}
_KINDS: Mapping[type, Mapping[str, Any]] = {
    str: _TEXT,
    list: {"type": "array", "items": _TEXT, "minItems": 1},
}


def job_schema() -> dict[str, Any]:
    """The schema as plain values."""
    definitions: dict[str, Any] = {
        _ENVIRONMENT: {
            "description": "A value from the environment: ${env:NAME} or ${env:NAME:-default}.",
            "type": "string",
            "pattern": r"\$\{env:",
        }
    }
    properties = _properties(TopSpec, (), definitions)
    properties[INCLUDE] = {
        "description": "Job files underneath this one: maps merge, lists replace, this file wins.",
        "anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}],
    }
    for name, model in SECTIONS.items():
        properties[name] = _section(name, model, definitions)
    whole = {name: {"anyOf": [*_shorthands(name), {"required": ["path"]}]} for name in REQUIRED}
    return {
        "$schema": DRAFT,
        "title": "batchgen job",
        "description": "A job for `batchgen run`.",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        # What is needed may stand in an included file.
        "if": {"not": {"required": [INCLUDE]}},
        "then": {
            "required": list(REQUIRED),
            "properties": whole,
        },
        "$defs": definitions,
    }


def _section(name: str, model: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    whole = {
        "type": "object",
        "properties": _properties(model, (name,), definitions),
        "additionalProperties": False,
    }
    optional = [] if name in REQUIRED else [{"type": "null"}]
    return {
        "description": " ".join((model.__doc__ or "").split()),
        "anyOf": [*_shorthands(name), whole, *optional],
    }


def _shorthands(name: str) -> list[Mapping[str, Any]]:
    return [_KINDS[kind] for kind in SHORTHAND.get(name, ())]


def _properties(model: type[Section], at: tuple[str, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    """The keys of one section, those of later versions too."""
    made = model.model_json_schema()
    definitions.update(made.get("$defs", {}))
    properties = {key: _key(model, key, schema) for key, schema in made["properties"].items()}
    for path, off in MEANS_OFF.items():
        if path[:-1] == at:
            properties[path[-1]] = {
                "description": "Not available in this version.",
                "deprecated": True,
                "enum": list(off),
                "default": off[0],
            }
    return properties


def _key(model: type[Section], key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    field = model.model_fields[key]
    allowed = next((rule.allowed for rule in field.metadata if isinstance(rule, Rule)), "")
    shown: dict[str, Any] = {"description": f"Use {allowed}."} if allowed else {}
    if "default" in schema:
        shown["default"] = schema["default"]
    rest = {name: value for name, value in schema.items() if name not in ("title", "default", "description")}
    if any(_closed_text(branch) for branch in _branches(rest)):
        return {**shown, "anyOf": [*_branches(rest), {"$ref": f"#/$defs/{_ENVIRONMENT}"}]}
    return {**shown, **rest}


def _branches(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from schema["anyOf"] if "anyOf" in schema and len(schema) == 1 else [schema]


def _closed_text(schema: Mapping[str, Any]) -> bool:
    """Whether it takes some strings and not others."""
    return schema.get("type") == "string" and any(word in schema for word in ("enum", "const", "pattern"))
