"""The job file is YAML 1.2 with places: what each trap of YAML 1.1 becomes, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from batchgen.job.faults import Origin
from batchgen.job.yaml_loader import MOST_BYTES, parse_document, parse_override, read_document, split_key
from batchgen.types import UsageError


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("+7", 7),
        ("1_000", "1_000"),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("12:30:00", "12:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("0b11", "0b11"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("'1e-3'", "1e-3"),
        ("!!str 1", "1"),
        ("!!float 3", 3.0),
        ("=", "="),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
    ],
)
def test_scalars_follow_the_core_schema(written: str, value: object) -> None:
    document = parse_document(f"key: {written}\n", "job.yaml")
    assert document.faults == []
    assert document.data == {"key": value}
    assert type(document.data["key"]) is type(value)


def test_keys_are_strings_whatever_they_look_like() -> None:
    assert parse_document("on: 1\n2: x\nnull: y\n", "f").data == {"on": 1, "2": "x", "null": "y"}


def test_every_key_and_value_has_its_place() -> None:
    document = parse_document("a: 1\nb:\n  - x\n  - {c: 2}\n", "job.yaml")
    assert document.key_origin(("b", 1, "c")) == Origin("job.yaml", 4, 6)
    assert document.origin(("b", 1, "c")) == Origin("job.yaml", 4, 9)
    assert document.origin(("b", 0)) == Origin("job.yaml", 3, 5)
    assert document.origin(("b", 1, "gone")) == Origin("job.yaml", 4, 5)


def test_a_fault_does_not_hide_the_next_one() -> None:
    text = "a: 1\na: 2\nb: !!python/object/apply:os.system [x]\nc: !!binary aGk=\n? [k]\n: 1\n"
    assert [str(f) for f in parse_document(text, "job.yaml").faults] == [
        "job.yaml:2:1: the key a is given twice, first at job.yaml:1:1; remove one of them",
        "job.yaml:3:4: b: the YAML tag !!python/object/apply:os.system is not allowed; write a plain value",
        "job.yaml:4:4: c: the YAML tag !!binary is not allowed; write a plain value",
        "job.yaml:5:3: a key must be a single word; quote a template that begins with {{",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", r"^f:2:2: not valid YAML .*; close the \["),
        ("a: {{ x }\nb: 2\n", r"^f:2:1: not valid YAML .*; close the {"),
        ("a: b: c\n", r"^f:1:5: not valid YAML .*; quote a text that holds a colon and a space"),
        ("a: 1\n---\nb: 2\n", r"^f:2:1: not valid YAML .*; a job file is one document, so remove the line"),
        ("a:\n\tb: 2\n", r"^f:2:1: not valid YAML .*; indent with spaces, not tabs"),
        ("a: 50%\nb: %d\n", r"^f:2:4: not valid YAML .*; quote a value that begins with this character"),
        ('a: "\\d"\n', r"^f:1:6: not valid YAML .*; in double quotes a backslash begins an escape"),
        ('a: "b\n', r"^f:2:1: not valid YAML .*; close the quote"),
        ("a: 1\n  b: 2\n", r"^f:2:4: not valid YAML .*; quote a text that holds a colon"),
        ('a: "\\UFFFFFFFF"\n', r"^f: not valid YAML .*; correct the escape"),
        ("- a\n", r"^f:1:1: a job file is a map of keys"),
        ("a: \x07\n", r"^f: not valid YAML \(.*remove that character"),
        ("a: *nowhere\n", r"^f:1:4: not valid YAML .*undefined alias"),
        ("a: " + "[" * 1000, r"^f: not valid YAML \(nested deeper than 100 levels\)"),
    ],
)
def test_what_is_not_yaml_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_document(text, "f")


def test_aliases_are_read_but_can_neither_loop_nor_explode() -> None:
    assert parse_document("a: &x [1]\nb: *x\n", "f").data == {"a": [1], "b": [1]}
    loop = parse_document("a: &x [*x]\n", "f")
    assert [str(fault) for fault in loop.faults] == [
        "f:1:4: a[0]: an alias cannot stand inside what it names"
    ]
    bomb = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    with pytest.raises(UsageError, match="more than 100,000 values; do aliases multiply"):
        parse_document(bomb, "f")
    deep = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 2000))
    with pytest.raises(UsageError, match="nested deeper than 100 levels"):
        parse_document(deep, "f")


def test_a_tag_on_the_whole_file_is_refused() -> None:
    document = parse_document("!x\na: 1\n", "f")
    assert document.data == {}
    assert [str(f) for f in document.faults] == ["f:1:1: the YAML tag !x is not allowed; write a plain value"]


def test_merge_keys_are_not_yaml_1_2() -> None:
    document = parse_document("a: &x {b: 1}\nc:\n  <<: *x\n  '<<': 2\n!!binary d: 1\n", "f")
    assert document.data == {"a": {"b": 1}, "c": {"<<": 2}}
    assert [str(fault) for fault in document.faults] == [
        "f:3:3: merge keys (<<) are not part of YAML 1.2; write the keys out, or use include",
        "f:5:1: the YAML tag !!binary is not allowed; write a plain key",
    ]


def test_environment_only_inside_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME", "secret")
    monkeypatch.delenv("NONE", raising=False)
    document = parse_document(
        'a: "x ${env:SOME} y"\nb: ${env:NONE:-12}\nc: ${env:NONE:-}\nd: ${other} $SOME\n', "f"
    )
    assert document.data == {"a": "x secret y", "b": "12", "c": "", "d": "${other} $SOME"}
    assert document.literals() == {
        ("a",): "x ${env:SOME} y",
        ("b",): "${env:NONE:-12}",
        ("c",): "${env:NONE:-}",
    }


def test_environment_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NONE", raising=False)
    document = parse_document("a: ${env:NONE}\nb: ${env:1x}\nc: x ${env:HOME\n", "f")
    assert [str(fault) for fault in document.faults] == [
        "f:1:4: a: the environment variable NONE is not set; set it, or write ${env:NONE:-default}",
        "f:2:4: b: ${env:1x} does not name a variable; write ${env:NAME} or ${env:NAME:-default}",
        "f:3:4: c: ${env: is not closed; write ${env:NAME}",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("no", "no"),
        ("", None),
        ("[a, 1]", ["a", 1]),
        ("{a: 1}", {"a": 1}),
        ("{{ title }}: {{ body }} # x", "{{ title }}: {{ body }} # x"),
        ('"1"', "1"),
        (" a b ", " a b "),
        ('it\'s "so"', 'it\'s "so"'),
        ("'it''s'", "it's"),
        ('["a, b", \'c"d\', null]', ["a, b", 'c"d', None]),
        ("null", None),
        ("{x: {y: [1]}}", {"x": {"y": [1]}}),
        ("{% if a %}x{% endif %}", "{% if a %}x{% endif %}"),
        ("{# note #}x", "{# note #}x"),
        ("a=b", "a=b"),
    ],
)
def test_an_override_is_read_by_the_same_rules(text: str, value: object) -> None:
    document = parse_override("a.b", text, "--set a.b")
    assert document.data == {"a": {"b": value}}
    assert str(document.origin(("a", "b"))) == "--set a.b"


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("a.b", ("a", "b")),
        ('a."b.c".d', ("a", "b.c", "d")),
        ("a.'b=c'", ("a", "b=c")),
        ("a..b", ()),
        (".a", ()),
        ("", ()),
        ('a."b', ()),
        ('a.""', ()),
    ],
)
def test_a_key_with_dots_in_it_is_quoted(key: str, parts: tuple[str, ...]) -> None:
    assert split_key(key) == parts


def test_an_override_lies_over_the_file() -> None:
    document = parse_document("a: {b: 1, c: [1, 2], d: {e: 1, f: 2}}\n", "f")
    for key, text in (("a.c", "[3]"), ("a.d", "{e: 9}"), ("x.y", "1")):
        document.overlay(parse_override(key, text, f"--set {key}"))
    assert document.data == {"a": {"b": 1, "c": [3], "d": {"e": 9, "f": 2}}, "x": {"y": 1}}
    assert str(document.origin(("a", "c", 0))) == "--set a.c"
    assert str(document.origin(("a", "c", 1))) == "--set a.c"
    assert str(document.origin(("a", "d", "f"))) == "f:1:35"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.yaml: the job file cannot be read \(No such file"):
        read_document(tmp_path / "gone.yaml")
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    with pytest.raises(
        UsageError, match=r"latin.yaml: the job file is not UTF-8 text \(byte 9\); give a job file saved"
    ):
        read_document(tmp_path / "latin.yaml")
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfname: x\r\n")
    assert read_document(tmp_path / "bom.yaml").data == {"name": "x"}
    (tmp_path / "large.yaml").write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(UsageError, match=r"larger than 1,000,000 bytes; give a job file, not the input"):
        read_document(tmp_path / "large.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_document(tmp_path / "empty.yaml").data == {}
