"""What the death of a worker means: for its rows, for a row that may be guilty of it, and for the run.

The supervisor tells it of each death, and of what shows that the engine works.
"""

from __future__ import annotations

from collections.abc import Callable

from batchgen.grammar import agreeing, counted
from batchgen.job.canary import find_canary
from batchgen.job.dispatch import Dispatcher
from batchgen.job.poison import Suspects
from batchgen.job.pool import RowPool
from batchgen.job.recovery import OpenJob
from batchgen.job.window import Pending
from batchgen.job.workers import WorkerState, describe_exit
from batchgen.types import EngineError

MAX_BARREN_DEATHS = 4
MAX_FAILED_STARTS = 3
MAX_CONVICTIONS_IN_A_ROW = 10


class WorkerDeaths:
    """Decides how a run goes on after a worker has died.

    Args:
        job: whose rows they are.
        columns: that the prompt needs.
        find_guilty: whether rows of a dead worker run apart, to find out which of them kills the engine.
        pool: gets back the rows that are to run again.
        suspects: gets those that are to run apart.
        dispatcher: that knows which worker ran suspects.
        convict: called with a row that kills the engine; gives it its result.
        say: called with sentences for the user.
    """

    def __init__(
        self,
        job: OpenJob,
        columns: tuple[str, ...],
        *,
        find_guilty: bool,
        pool: RowPool,
        suspects: Suspects,
        dispatcher: Dispatcher,
        convict: Callable[[Pending], None],
        say: Callable[[str], None],
    ) -> None:
        self._job = job
        self._columns = columns
        self._find_guilty = find_guilty
        self._pool = pool
        self._suspects = suspects
        self._dispatcher = dispatcher
        self._convict = convict
        self._say = say
        self._barren = self._failed_starts = self._convictions = 0

    def worker_started(self) -> None:
        """A worker is ready."""
        self._failed_starts = 0

    def engine_worked(self) -> None:
        """Something new was computed."""
        self._barren = 0

    def row_finished(self) -> None:
        """A row is ok."""
        self._convictions = 0

    def died(self, worker: WorkerState, code: int | None, lines: list[str], living: int) -> None:
        """A worker has ended, and nobody had asked it to.

        Args:
            worker: it.
            code: its exit code; None where the supervisor ended it.
            lines: its last words.
            living: workers that are left.

        Raises:
            EngineError: it makes no sense to start another.
        """
        what = f"worker {worker.number} (process {worker.handle.pid}) {describe_exit(code)}"
        self._barren += 1
        self._failed_starts += not worker.ready
        if self._barren >= MAX_BARREN_DEATHS:
            tail = "\n  ".join(["its last words:", *lines]) if lines else "it said nothing"
            raise EngineError(
                f"{what}, {counted(self._barren, 'time')} in a row without a single new result; try less "
                f"memory (engine.max_num_seqs, engine.kv_cache_memory) or another node; {tail}"
            )
        self._say(f"{what}; {self._take_back(worker)}")
        if self._failed_starts >= MAX_FAILED_STARTS and living:
            self._dispatcher.most_workers = living
            self._say(f"a further worker does not start; going on with {living}")

    def _take_back(self, worker: WorkerState) -> str:
        """See to the rows of a worker that died; says what becomes of them."""
        in_step = worker.in_step()
        rows = worker.take_back()
        if worker is self._dispatcher.apart:
            self._dispatcher.apart = None
            return self._died_apart(rows, in_step)
        if not rows:
            return "it had no rows yet; starting another"
        if not self._find_guilty:
            self._pool.put_back(rows)
            return f"starting another, which gets its {counted(len(rows), 'row')} again"
        if self._suspects.canary is None and (known := find_canary(self._job, self._columns)) is not None:
            self._suspects.finished(*known)
        self._suspects.accuse(rows, in_step)
        return (
            f"starting another; its {counted(len(rows), 'row')} {agreeing(len(rows), 'runs', 'run')} again "
            "apart from others, to find out whether one of them kills the engine"
        )

    def _died_apart(self, rows: list[Pending], in_step: set[int]) -> str:
        if not rows:
            self._suspects.passed()
            return "starting another, because no suspected row was with it"
        guilty = self._suspects.died(rows, in_step)
        if guilty is None:
            return (
                f"starting another; {counted(len(rows), 'row')} {agreeing(len(rows), 'is', 'are')} suspected"
            )
        self._convictions += 1
        if self._convictions > MAX_CONVICTIONS_IN_A_ROW:
            raise EngineError(
                f"the engine died on each of {self._convictions} rows that ran alone, the last being row "
                f"{guilty.row}, and no row finished in between; it looks broken, not the rows: try another "
                "node, then run `batchgen retry` on the rows that failed with engine_crash"
            )
        self._convict(guilty)
        return f"row {guilty.row} kills the engine also when it runs alone, and becomes an error row"
