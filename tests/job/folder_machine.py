"""What the state machines of an output folder have in common: a small input, its plan, and the folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis.stateful import RuleBasedStateMachine
from job_inputs import read_output

from batchgen.data.results import plan_output
from batchgen.data.row_result import RowResult
from batchgen.data.source import open_input
from batchgen.job.folder import JobFolder
from batchgen.job.journal import JournalReader, ResultRecord
from batchgen.job.replay import Replay

JOB = "job"


class FolderMachine(RuleBasedStateMachine):
    """An input of `num_rows` rows, and a created output folder for its results as JSONL.

    Args:
        num_rows: rows of the input.
        place: where the folder of both is made; None for the usual one.
    """

    def __init__(self, num_rows: int, place: str | None = None) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="batchgen-machine-", dir=place))
        path = self.root / "in.jsonl"
        path.write_text("".join(f'{{"prompt": "{row}"}}\n' for row in range(num_rows)))
        self.inputs = open_input([str(path)])
        self.plan = plan_output(self.inputs, format="jsonl")
        self.rows = list(self.inputs.rows())
        self.folder = JobFolder(self.root / "out")
        self.folder.create()
        self.serial = 0

    def teardown(self) -> None:
        self.inputs.close()
        shutil.rmtree(self.root)

    def result(self, row: int, text: str) -> bytes:
        """Payload of a result."""
        return ResultRecord(self.rows[row].digest, RowResult("ok", text, "stop", usage=(1, 2, 0))).pack()

    def texts(self, found: Replay) -> dict[int, str]:
        """By row, what the results in the journal say."""
        reader = JournalReader(self.folder.journal, JOB)
        payloads = reader.results([(row, one.location) for row, one in found.results.items()])
        reader.close()
        return dict(zip(found.results, map(text_of, payloads), strict=True))

    def stored(self) -> dict[int, str]:
        """By row, what the parts say."""
        return {row["row"]: row["generated_text"] for row in read_output(self.folder.root)}


def text_of(payload: bytes) -> str:
    """The text of a result."""
    return str(ResultRecord.unpack(payload).result.generated_text)
