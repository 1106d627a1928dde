"""What goes wrong while jobs run, and in the verbs that look at what they left."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
from scenarios import parquet
from scripted_worker import Script
from stage import Stage, rows, write_files
from tiny_models import save_tokenizer
from tokenizers import Tokenizer, models

from batchgen.api import checks, job
from batchgen.data.id_ledger import IdLedger
from batchgen.data.source import open_input
from batchgen.job import journal, lease, supervisor
from batchgen.job.claims import Claims
from batchgen.job.folder import JobFolder
from batchgen.text import control_tokens
from batchgen.types import ErrorClass

RUN = "run job.yaml --progress none"
PLENTY, LITTLE = SimpleNamespace(free=1 << 40), SimpleNamespace(free=1000)


def _ends_early(stage: Stage, script: Script, output: str, parts: int, *settings: str) -> None:
    """A run that ends for want of disk space, so many parts and what else does not stall being done."""
    later = iter([PLENTY] * 3)

    def usage(place: Path) -> SimpleNamespace:
        done = len(list(Path(output, "data").glob("part-*.parquet"))) >= parts
        return next(later, LITTLE) if done else PLENTY

    with stage.patched((supervisor.shutil, "disk_usage", usage)):
        stage.batchgen(RUN, 5, script, "run.checkpoint_seconds=0.05", *settings)


def bad_rows_stop(stage: Stage) -> None:
    """A row that cannot be read, or fails, where the job is not to go on."""
    stage.write(prompts_jsonl=rows(1005) + "{broken\n")
    stage.batchgen(RUN, 3, None, "input.on_bad_row=stop")
    stage.write(prompts_jsonl=rows(3))
    failing = Script(fails={1: ("nonfinite", "the logits are not finite")})
    stage.batchgen(f"{RUN} --overwrite", 3, failing, "run.fail_fast=true")
    stage.write(prompts_jsonl=rows(3) + "{broken\n")
    for setting in ("input.on_bad_row=stop", "run.fail_fast=true"):
        stage.batchgen("validate job.yaml", 3, None, setting)


def engines_that_die(stage: Stage) -> None:
    """Engines that die at once, on each row, or say what nobody understands."""
    stage.write(prompts_jsonl=rows(14))
    stage.batchgen(RUN, 7, Script(dies=True))
    stage.batchgen(RUN, 7, Script(cannot_start=OSError(12, "Cannot allocate memory")))
    stage.batchgen(RUN, 7, Script(says={"type": "song"}))
    stage.batchgen(RUN, 2, Script(fatal=(2, "engine.block_size: 3 is no block size; use 16")))
    stage.batchgen(RUN, 7, Script(kills=range(1, 14)))
    stage.write(prompts_jsonl=rows(40))
    stage.batchgen(f"{RUN} --overwrite", 7, Script(kills=range(8, 40)))


def other_choices(stage: Stage) -> None:
    """A job that is continued, but differs, or would compute otherwise than it began."""
    stage.write(prompts_jsonl=rows(4))
    stage.batchgen(f"{RUN} --limit 2", 0)
    stage.batchgen(f"{RUN} --limit 1", 4)
    stage.batchgen(f"{RUN} --rows 1:3", 4)
    stage.batchgen(RUN, 4, Script(pinned={"dtype": "bfloat16"}))
    for verb in (RUN, "plan job.yaml"):
        stage.batchgen(verb, 4, None, "sampling.temperature=1")
    stage.batchgen(f"{RUN} --accept-drift", 4, None, "output.format=jsonl")
    stage.batchgen(f"{RUN} --limit 2", 0)
    stage.write(prompts_jsonl=rows(4).replace("p0", "q0"))
    stage.batchgen(f"{RUN} --accept-drift", 4)


def ids_that_occur_twice(stage: Stage) -> None:
    """Behind the rows that are looked at before weights are loaded, and in parts that exist."""
    many = rows(20, key="k").replace('"k"', '"k%d"') % tuple(range(20))
    stage.write(prompts_jsonl=many.replace('"k19"', '"k0"'))
    with stage.patched((job, "ROWS_FOR_IDS", 5)):
        stage.batchgen(RUN, 2, None, "input.id=key")
    with stage.patched((checks, "ROWS_FOR_IDS", 5)):
        stage.batchgen("plan job.yaml --full", 2, None, "input.id=key")
    with stage.patched((IdLedger, "merge_all", lambda ledger: [run.path.unlink() for run in ledger._runs])):
        stage.batchgen(f"{RUN} --overwrite", 5, None, "input.id=key", "input.duplicate_ids=suffix")
    stage.batchgen(f"{RUN} --overwrite", 0, None, "input.id=key", "input.duplicate_ids=suffix")
    stage.batchgen(RUN, 4, None, "input.id=key", "input.duplicate_ids=keep_first")


def retries(stage: Stage) -> None:
    """What cannot be retried, and what is in the way of it."""
    stage.write(prompts_jsonl=rows(4))
    failing = Script(fails={1: (ErrorClass.TIMEOUT, "no answer")})
    stage.batchgen(f"{RUN} --limit 2", 0, failing, "output.include=[usage]")
    stage.batchgen("retry out --where finish_reason=length", 2)
    stage.batchgen("retry out --where timeuot", 2)
    stage.batchgen("retry out --where row=x", 2)
    stage.batchgen("retry out", 2, None, "output.format=jsonl")
    stage.batchgen("retry out", 2, None, "sampling.n=2", "sampling.temperature=1")
    stage.batchgen("retry out", 7, Script(dies=True), "sampling.temperature=1")
    stage.batchgen(RUN, 4, None, "output.include=[usage]", "input.limit=2")
    stage.batchgen("retry out --where row=0", 2)
    stage.batchgen("retry out", 0, failing)


def parts_that_rot(stage: Stage) -> None:
    """Bytes of a part that change on the disk after the folder was looked at."""
    from batchgen.job import folder_rows, replacement
    from batchgen.job import retry as retry_module
    from batchgen.job.report import compare

    def rotten(*arguments: Any, **named: Any) -> Any:
        raise ValueError("Column data is corrupt")
        yield

    stage.write(prompts_jsonl=rows(4))
    stage.batchgen(RUN, 0, Script(fails={1: (ErrorClass.TIMEOUT, "no answer")}))
    with stage.patched((retry_module, "read_part", rotten)):
        stage.batchgen("retry out", 5)
    with stage.patched((compare, "read_part", rotten)):
        stage.batchgen("report out --compare out", 5)
    with stage.patched((folder_rows, "read_records", rotten)):
        stage.batchgen("export out --format csv", 5)
    with stage.patched((replacement, "read_part", rotten)):
        stage.batchgen("retry out", 5)


def dialogues(stage: Stage) -> None:
    """Several answers in a row, where a format holds one."""
    stage.write(prompts_jsonl='{"u": ["a", "b"]}\n')
    stage.batchgen(RUN, 0, None, "sampling.turns=u")
    stage.batchgen("export out --format openai_batch", 2)


def tasks_without_answers(stage: Stage) -> None:
    """Rows that were embedded, where a format holds answers."""
    stage.write(prompts_jsonl='{"text": "a"}\n{"text": ""}\n')
    stage.batchgen(RUN, 0, None, "task=embed")
    stage.batchgen("export out --format openai_batch", 2)


def parts_that_are_gone(stage: Stage) -> None:
    """What is left of a complete folder is not all of it."""
    stage.write(prompts_jsonl=rows(40))
    stage.batchgen(RUN, 0, None, "output.part_rows=16")
    Path("out/data/part-000001.parquet").unlink()
    stage.batchgen("export out --format csv", 5)


def rows_that_are_chosen(stage: Stage) -> None:
    """Fewer rows than are in parts, where a condition selects them, so that nothing else can tell."""
    stage.write(prompts_jsonl=rows(40, n=1))
    settings = ("output.part_rows=16", "input.where=n = 1")
    _ends_early(stage, Script(stalls=[3]), "out", 2, *settings)
    stage.batchgen(f"{RUN} --limit 30", 4, None, *settings)
    stage.batchgen(f"{RUN} --limit 10", 4, None, *settings)


def inputs_that_change(stage: Stage) -> None:
    """Types of columns, and rows behind the last one, in files that look the same from outside."""
    stage.write(a_parquet=parquet(pa.table({"prompt": ["a", "b"], "n": [1, 2]})))
    stage.batchgen(f"{RUN} --limit 1", 0, None, "input=a.parquet")
    stage.write(a_parquet=parquet(pa.table({"prompt": ["a", "b"], "n": ["1", "2"]})))
    stage.batchgen(f"{RUN} --accept-drift", 4, None, "input=a.parquet")
    last = rows(19)[len(rows(18)) :]
    stage.write(prompts_jsonl=rows(18) + " " * (len(last) - 1) + "\n")
    before = Path("prompts.jsonl").stat()
    settings = ("output.part_rows=16", "output.path=again")
    _ends_early(stage, Script(stalls=[17]), "again", 1, *settings)
    stage.write(prompts_jsonl=rows(18) + last)
    os.utime("prompts.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    stage.batchgen(RUN, 3, None, *settings)


def journals_that_rot(stage: Stage) -> None:
    """A record that is intact when it is written and not when its part is made."""
    with stage.patched((journal, "_payload_at", lambda *arguments: None)):
        stage.batchgen(RUN, 5)


def texts_that_no_tokenizer_takes(stage: Stage) -> None:
    """Tokenizers without a template or a token for unknown words, one that cannot be copied; a long line."""
    save_tokenizer(Path("mute"))
    Path("mute/chat_template.jinja").unlink()
    stage.batchgen("validate job.yaml", 2, None, "model.tokenizer=mute")
    stage.batchgen("validate job.yaml", 2, None, "prompt.chat_template=tool_use")
    words = Tokenizer(models.WordLevel({"hello": 0}, unk_token="?")).to_str()
    write_files({"words/tokenizer.json": words})
    show = "show job.yaml"
    stage.batchgen(show, 0, None, "model.tokenizer=words", "prompt.mode=completion")
    stage.write(prompts_jsonl='{"prompt": "<|im_end|>"}\n')
    with stage.patched((control_tokens, "_rename", lambda settings, names: None)):
        stage.batchgen(show, 0)
    stage.write(prompts_jsonl='{"prompt": "a"}\n{"prompt": "hello"}\n')
    with mock.patch.dict(open_input.__kwdefaults__, max_record_bytes=16):
        stage.batchgen(f"{show} --row 1", 0)


def jobs_that_did_not_end(stage: Stage) -> None:
    """Half of a job, which is retried, exported and verified."""
    stage.write(prompts_jsonl=rows(4))
    _ends_early(stage, Script(stalls=[3]), "out", 0)
    with stage.patched((supervisor.shutil, "disk_usage", lambda place: LITTLE)):
        stage.batchgen(RUN, 5)
    stage.batchgen("retry out", 2)
    stage.batchgen("export out --format csv --columns sumary", 2)
    stage.batchgen("export out --format openai_batch --columns id", 2)
    stage.write(taken_csv="")
    stage.batchgen("export out --format csv --output taken.csv", 2)
    stage.batchgen("export out --format csv --output out/manifest.json --force", 2)
    before = Path("prompts.jsonl").stat()
    stage.write(prompts_jsonl=rows(4).replace("p1", "q1"))
    os.utime("prompts.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    stage.batchgen(RUN, 3)


def verified_in_depth(stage: Stage) -> None:
    """`verify --deep` with an engine that does not run here."""
    stage.batchgen(RUN, 0)
    stage.batchgen("verify out --deep 2", 7, Script(fatal=(7, "CUDA error: out of memory")))
    stage.batchgen("verify out --deep 2", 7, Script(dies=True))


def damaged_folders(stage: Stage) -> None:
    """A folder with links and a spoilt manifest in it."""
    stage.batchgen(RUN, 0)
    manifest = Path("out/manifest.json")
    kept = manifest.read_text()
    manifest.write_text(kept.replace('"checksum": "', '"checksum": "0'))
    stage.batchgen(RUN, 5)
    manifest.write_text(kept)
    shutil.move("out/data", "elsewhere")
    Path("out/data").symlink_to("../elsewhere")
    Path("out/_SUCCESS").unlink()
    stage.batchgen(RUN, 2)


def several_at_once(stage: Stage) -> None:
    """Another process that lives, takes over, or is about to."""
    stage.batchgen(RUN, 0)
    folder = JobFolder(Path("out").absolute())
    Path("out/_SUCCESS").unlink()
    shutil.rmtree("out/data")
    beats = iter(range(10, 99))

    def alive(path: Path) -> Any:
        return SimpleNamespace(
            owner=SimpleNamespace(pid=77, host="gpu7", is_dead=lambda have_lock: False),
            beat=next(beats),
            released=False,
        )

    with stage.patched((lease, "read_lease", alive), (lease, "_POLL_SECONDS", 0.01)):
        stage.batchgen(RUN, 6)
    highest = Claims.current
    with stage.patched((Claims, "current", lambda self: highest(self) - 1)):
        stage.batchgen(RUN, 6)
    with stage.patched((Claims, "current", lambda self: highest(self) + 1)):
        stage.batchgen(RUN, 6, Script(stalls=[1]), "run.checkpoint_seconds=0.05")
    taken = Path("out/.batchgen/lease.json")

    def take_over(place: Any) -> Any:
        taken.unlink(missing_ok=True)
        return PLENTY

    assert folder.lease == taken.absolute()
    with stage.patched((supervisor.shutil, "disk_usage", take_over)):
        stage.batchgen(RUN, 6, Script(stalls=[1]), "run.lease_seconds=0.2", "run.checkpoint_seconds=0.05")


def ways_around(stage: Stage) -> None:
    """Settings that name what is not there, and addresses that are taken."""
    stage.batchgen("validate job.yaml", 2, None, "run.priority=urgency")
    stage.batchgen("validate job.yaml", 2, None, "output.push_to_hub=me/results")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        stage.batchgen(RUN, 2, None, f"run.metrics=127.0.0.1:{other.getsockname()[1]}")
    Path("nothing").symlink_to("nowhere")
    stage.batchgen("validate job.yaml", 2, None, "output.path=nothing")
    Path("out").mkdir()
    with stage.patched((os, "access", lambda path, mode: "out" not in str(path))):
        for verb in ("validate job.yaml", RUN):
            stage.batchgen(verb, 5)
    stage.batchgen(RUN, 0)
    Path("out/report.html").unlink()
    Path("out/report.html").mkdir()
    stage.batchgen("report out", 5)


ALL = [
    *(bad_rows_stop, engines_that_die, other_choices, ids_that_occur_twice, retries, parts_that_rot),
    tasks_without_answers,
    *(dialogues, parts_that_are_gone, rows_that_are_chosen, inputs_that_change, journals_that_rot),
    *(texts_that_no_tokenizer_takes,),
    *(jobs_that_did_not_end, verified_in_depth, damaged_folders, several_at_once, ways_around),
]
