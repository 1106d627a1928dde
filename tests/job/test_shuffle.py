"""`input.shuffle`: another order of execution, the same bytes."""

import json
from pathlib import Path

from job_driver import Settings, run_here

from batchgen.job.row_order import shuffled


def test_the_order_is_a_function_of_seed_and_row() -> None:
    orders = [sorted(range(200), key=lambda row: shuffled(seed)(row, [], 0)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] not in (orders[2], list(range(200)))


def test_rows_run_in_another_order_and_lie_in_theirs(tmp_path: Path) -> None:
    rows = (json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(40))
    (tmp_path / "in.jsonl").write_text("".join(rows))
    data = []
    for name, options in (("plain", {}), ("shuffled", {"shuffle": 3})):
        settings = Settings(
            output=str(tmp_path / name), input=str(tmp_path / "in.jsonl"), max_num_seqs=2, options=options
        )
        assert run_here(settings).exit_code == 0
        data.append([path.read_bytes() for path in sorted((tmp_path / name / "data").iterdir())])
    assert data[0] == data[1]
