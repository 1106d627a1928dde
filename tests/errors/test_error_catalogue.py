"""The catalogue of what users are told: each sentence, from the place in the source that says it.

`python tests/errors/test_error_catalogue.py` writes `sentences.txt` and `uncovered.txt` anew; look at the
difference: a changed sentence is a changed interface, and a new error belongs into `scenarios.py`, where one
command line meets it, or into a story (`stories_of_*.py`), where it takes more.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
_TESTS = HERE.parent
sys.path[:0] = [
    *(str(HERE), str(_TESTS), str(_TESTS / "job"), str(_TESTS / "data")),
    *(str(HERE.parents[1]), str(HERE.parents[1] / "kernels")),
]

import pytest
import scenarios
import stories_of_jobs
import stories_of_places
import stories_of_python
from raise_sites import raise_sites
from recorder import Noted, recording
from stage import Stage, write_files
from tiny_models import save_tokenizer

from batchgen.cli.main import main
from batchgen.text.tokenizer import Tokenizer

SENTENCES, UNCOVERED = HERE / "sentences.txt", HERE / "uncovered.txt"
REASON = "  # "
STORIES = [*stories_of_jobs.ALL, *stories_of_places.ALL, *stories_of_python.ALL]


@dataclass
class Catalogue:
    """What all scenarios and stories together were told.

    Attributes:
        told: notes by place; the first whose sentence a user saw, or else the first.
        wrong: what was not as it must be.
    """

    told: dict[str, Noted] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def take(self, noted: Iterable[Noted], said: str, world: Path) -> None:
        """Add what one scenario made."""
        for note in noted:
            shown = note.sentence in said
            if note.name not in self.told or (shown and note.name not in self._seen):
                self.told[note.name] = note._replace(sentence=_plain(note.sentence, world))
            if shown:
                self._seen.add(note.name)


def _model(folder: Path) -> Path:
    folder.mkdir()
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def _plain(sentence: str, world: Path) -> str:
    """Without what differs from run to run: folders, numbers, and what other libraries say in brackets."""
    sentence = sentence.replace(str(world), "HERE").replace(str(world.parent), "HERE/..")
    sentence = re.sub(r"\((\w+(?:Error|Enabled)): .*?\); ", r"(\1: …); ", sentence, flags=re.DOTALL)
    sentence = re.sub(r"127\.0\.0\.1:[0-9]+", "127.0.0.1:PORT", sentence)
    sentence = re.sub(r"\.tmp-([\w.]+)-[0-9a-f]{12}", r".tmp-\1-RANDOM", sentence)
    sentence = re.sub(r"by \S+ on \S+, [-0-9T:+]+", "by USER on HOST, TIME", sentence)
    sentence = re.sub(r"[0-9][0-9,]{5,} are available", "N are available", sentence)
    return re.sub(r"[0-9][0-9,]{5,} bytes free", "N bytes free", sentence)


@contextlib.contextmanager
def _world(place: Path, noted: list[Noted]) -> Iterator[None]:
    """A fresh current folder with a cache of its own; errors are noted, tokenizers loaded once."""
    place.mkdir()
    os.chdir(place)
    cache = mock.patch.dict(os.environ, {"BATCHGEN_CACHE": str(place / "cache")})
    with cache, mock.patch.object(Tokenizer, "load", _load_once), recording(noted):
        yield


_load_once = functools.cache(Tokenizer.load)


def _run(scenario: scenarios.Scenario, world: Path, model: Path, catalogue: Catalogue) -> None:
    noted: list[Noted] = []
    out, err = io.StringIO(), io.StringIO()
    with _world(world, noted), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        Stage(model)
        write_files(dict(scenario.files))
        code = main(scenario.command)
    said = out.getvalue() + err.getvalue()
    if not noted:
        catalogue.wrong.append(f"{scenario.command} made no error: {said}")
    elif "Traceback" in said or (code == 0) != scenario.row:
        catalogue.wrong.append(f"{scenario.command} ended with {code}: {said}")
    catalogue.take(noted, said, world)


def run_all(root: Path) -> Catalogue:
    """Every scenario and every story."""
    model, catalogue = _model(root / "model"), Catalogue()
    for number, scenario in enumerate(scenarios.ALL):
        _run(scenario, root / str(number), model, catalogue)
    for story in STORIES:
        world, noted = root / story.__name__, []
        with _world(world, noted):
            stage = Stage(model)
            story(stage)
        catalogue.wrong += [f"{story.__name__}: {problem}" for problem in stage.wrong]
        catalogue.take(noted, stage.said, world)
    return catalogue


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalogue]:
    """What all of them were told."""
    before = Path.cwd()
    try:
        yield run_all(tmp_path_factory.mktemp("errors"))
    finally:
        os.chdir(before)


def _text(told: dict[str, Noted]) -> str:
    blocks = [
        f"{name} ({told[name].kind})" + "".join(f"\n    {line}" for line in told[name].sentence.split("\n"))
        for name in sorted(told)
    ]
    return "\n".join(blocks) + "\n"


def _reasons() -> dict[str, str]:
    """By the place of an error that is in no scenario, why."""
    lines = [line.partition(REASON) for line in UNCOVERED.read_text().splitlines()]
    return {name: reason for name, _, reason in lines}


def test_every_scenario_ends_in_a_sentence(catalogue: Catalogue) -> None:
    assert catalogue.wrong == []


def test_the_sentences_are_those_of_the_catalogue(catalogue: Catalogue) -> None:
    assert _text(catalogue.told) == SENTENCES.read_text(encoding="utf-8")


def test_every_error_of_the_product_is_in_the_catalogue_or_known_to_lack(catalogue: Catalogue) -> None:
    """A new error needs a scenario; one that no test can raise stands in `uncovered.txt`, with the reason."""
    lacking = [site.name for site in raise_sites() if site.name not in catalogue.told]
    assert lacking == list(_reasons())


def test_every_sentence_of_the_job_says_what_to_do(catalogue: Catalogue) -> None:
    """After a semicolon, on its own line, as a question, or by a caret; those of rows say what is wrong."""
    of_rows = {site.name for site in raise_sites() if site.kind == "RowFailure"}
    told = {name: note.sentence for name, note in catalogue.told.items() if name not in of_rows}
    assert {name: sentence for name, sentence in told.items() if not set(";?^\n") & set(sentence)} == {}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        result = run_all(Path(folder))
        os.chdir(HERE)
    print("\n".join(result.wrong))
    SENTENCES.write_text(_text(result.told), encoding="utf-8")
    reasons = _reasons()
    lacking = [site.name for site in raise_sites() if site.name not in result.told]
    UNCOVERED.write_text("".join(f"{name}{REASON}{reasons.get(name, '?')}\n" for name in lacking))
    print(f"{len(result.told)} sentences, {len(raise_sites()) - len(result.told)} places without one")
