"""The catalogue of what users are told: each sentence, from the place in the source that says it.

`python tests/errors/test_error_catalogue.py` writes `sentences.txt` and `uncovered.txt` anew; look at the
difference: a changed sentence is a changed interface, and a new error belongs into `scenarios.py`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[1] / "kernels")]

import pytest
import scenarios
from raise_sites import raise_sites
from recorder import recording
from tiny_models import save_tokenizer

from batchgen.cli.main import main
from batchgen.text.tokenizer import Tokenizer

SENTENCES, UNCOVERED = HERE / "sentences.txt", HERE / "uncovered.txt"
JOB = "model: ./model\ninput: prompts.jsonl\noutput: out/\n"


def _write(files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def _world(model: Path) -> None:
    """The good small job in a fresh current folder."""
    _write({"job.yaml": JOB, "prompts.jsonl": '{"prompt": "hi"}\n{"prompt": "ho"}\n'})
    Path("model").symlink_to(model)


def _model(folder: Path) -> Path:
    folder.mkdir()
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def _plain(sentence: str, world: Path) -> str:
    """Without what differs from run to run: the folder, and what other libraries say in brackets."""
    sentence = sentence.replace(str(world), "HERE").replace(str(world.parent), "HERE/..")
    sentence = re.sub(r"\((\w+(?:Error|Enabled)): .*?\); ", r"(\1: …); ", sentence, flags=re.DOTALL)
    return re.sub(r"[0-9][0-9,]{5,} bytes free", "N bytes free", sentence)


def run_all(root: Path) -> tuple[dict[str, str], list[str]]:
    """Every scenario: the first sentence of each place, and what was not as it must be."""
    model, found, wrong = _model(root / "model"), {}, []
    load = functools.cache(Tokenizer.load)
    for number, scenario in enumerate(scenarios.ALL):
        world = root / str(number)
        world.mkdir()
        os.chdir(world)
        _world(model)
        _write(dict(scenario.files))
        noted: list[tuple[str, str]] = []
        out, err = io.StringIO(), io.StringIO()
        one_load = mock.patch.object(Tokenizer, "load", load)
        with one_load, recording(noted), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(scenario.command)
        said = out.getvalue() + err.getvalue()
        if not noted:
            wrong.append(f"{scenario.command} made no error: {said}")
        elif "Traceback" in said or (code == 0) != scenario.row:
            wrong.append(f"{scenario.command} ended with {code}: {said}")
        for name, sentence in noted:
            found.setdefault(name, _plain(sentence, world))
    return found, wrong


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[str]]:
    """Sentences by place, and scenarios that went otherwise than they must."""
    before = Path.cwd()
    try:
        return run_all(tmp_path_factory.mktemp("errors"))
    finally:
        os.chdir(before)


def _text(found: dict[str, str]) -> str:
    blocks = [name + "".join(f"\n    {line}" for line in found[name].split("\n")) for name in sorted(found)]
    return "\n".join(blocks) + "\n"


def test_every_scenario_ends_in_a_sentence(catalogue: tuple[dict[str, str], list[str]]) -> None:
    assert catalogue[1] == []


def test_the_sentences_are_those_of_the_catalogue(catalogue: tuple[dict[str, str], list[str]]) -> None:
    assert _text(catalogue[0]) == SENTENCES.read_text(encoding="utf-8")


def test_every_error_of_the_product_is_in_the_catalogue_or_known_to_lack(
    catalogue: tuple[dict[str, str], list[str]],
) -> None:
    """A new error needs a scenario; until it has one, its place stands in `uncovered.txt`."""
    lacking = [site.name for site in raise_sites() if site.name not in catalogue[0]]
    assert lacking == UNCOVERED.read_text().splitlines()


def test_every_sentence_of_the_job_says_what_to_do(catalogue: tuple[dict[str, str], list[str]]) -> None:
    """After a semicolon, as a question, or with a caret under the place; those of rows say what is wrong."""
    of_rows = {site.name for site in raise_sites() if site.kind == "RowFailure"}
    silent = {n: s for n, s in catalogue[0].items() if n not in of_rows and not set(";?^") & set(s)}
    assert silent == {}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        sentences, problems = run_all(Path(folder))
    print("\n".join(problems))
    SENTENCES.write_text(_text(sentences), encoding="utf-8")
    UNCOVERED.write_text("".join(f"{s.name}\n" for s in raise_sites() if s.name not in sentences))
    print(f"{len(sentences)} sentences, {len(raise_sites()) - len(sentences)} places without one")
