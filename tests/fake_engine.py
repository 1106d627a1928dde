"""A deterministic engine without a model, served by the real worker process; and how to launch it.

Protocol, intake, tokenization and counters are the product's own; only what `EngineCore` and the model do is
replaced. A row's answer is a hash of its ordinal, the job's seed and the ids of its prompt. How it behaves
(speed, crashes, hangs, error rows) is a `Behaviour`, given as JSON in the environment variable of `VARIABLE`.

As a program it is a worker: `python fake_engine.py --fd N`. `fake_batchgen.py` is the command line with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from batchgen.core.stats import SchedulerStats
from batchgen.dist.handle import launch_worker
from batchgen.dist.serve import ReadyEngine, serve
from batchgen.sampling.overrides import RowSampling
from batchgen.scores import Classification, TokenLogprob, TokenScores
from batchgen.text.prompt import PromptRenderer
from batchgen.text.prompt_spec import PromptSpec
from batchgen.text.task_request import TaskRequests
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import (
    EngineError,
    ErrorClass,
    FinishReason,
    InputError,
    Output,
    Request,
    RowError,
    Sample,
    SamplingParams,
    Task,
    UsageError,
)

VARIABLE = "BATCHGEN_FAKE_ENGINE"
VOCABULARY = 1 << 16
MAX_MODEL_LEN = 1 << 20
_FATAL = {2: UsageError, 3: InputError, 7: EngineError}
_ROW_ERRORS = frozenset(map(str, ErrorClass))
_KEY = struct.Struct("<qq")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong.

    Args:
        do: `kill`, `segfault`, `exit` or `hang` for the process; `fatal` or `raise` for an error that
            ends the engine; `stall` for a row that never gets a token while others do; else the error class
            of a row.
        rows: happens in a step in which one of these runs.
        after_tokens: happens once this process has sampled so many.
        at_start: happens before the engine is ready.
        until: a file; once it is there a `stall` ends.
        times: how often over all processes, counted in `Behaviour.state`; None for always.
        spare: how often it would happen first, and does not.
        exit_code: of `exit` and `fatal`.
        message: of `fatal` and of error rows.
    """

    do: str
    rows: tuple[int, ...] = ()
    after_tokens: int | None = None
    at_start: bool = False
    until: str | None = None
    times: int | None = None
    spare: int = 0
    exit_code: int = 11
    message: str = "the fake engine chokes"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How the engine behaves.

    Args:
        tokens: in every answer; None for 1 to `max_tokens`, by the hash.
        tokens_per_step: that a running row gets in one step; None for its whole answer.
        step_seconds: that a step takes.
        load_seconds: until the engine is ready.
        faults: what goes wrong.
        state: folder of what must be known across processes: which of `Fault.times` have been.
        pinned: besides what is pinned anyway.
        unpinned: what nobody has pinned yet differs from process to process.
        notes: for the user.
    """

    tokens: int | None = None
    tokens_per_step: int | None = None
    step_seconds: float = 0.0
    load_seconds: float = 0.0
    faults: tuple[Fault, ...] = ()
    state: str | None = None
    pinned: Mapping[str, Any] = field(default_factory=dict)
    unpinned: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Behaviour:
        values = json.loads(text)
        faults = [Fault(**{**f, "rows": tuple(f.get("rows", ()))}) for f in values.pop("faults", ())]
        return cls(**{**values, "faults": tuple(faults)})


def answer(
    seed: int, row: int, prompt: list[int], most: int, tokens: int | None = None, sample: int = 0
) -> list[int]:
    """Token ids of a whole answer: of a row, or of one of its samples."""
    key = _KEY.pack(seed, row) + array("I", prompt).tobytes() + b"s" * sample
    if tokens is None:
        tokens = 1 + int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") % most
    return array("H", hashlib.shake_128(key).digest(2 * min(tokens, most))).tolist()


def text_of(ids: list[int]) -> str:
    """The text of an answer: a word for each token."""
    return array("H", ids).tobytes().hex(" ", 2)


def scores_of(ids: Sequence[int], top_k: int) -> TokenScores:
    """Logprobs of tokens, each a function of its id alone; the second likeliest are those with odd ids."""

    def likeliest(token: int) -> tuple[TokenLogprob, ...]:
        best = token - token % 2
        return tuple(TokenLogprob((best + i) % VOCABULARY, -(best + i) / 64, 1 + i) for i in range(top_k))

    return TokenScores(
        array("q", ids),
        array("d", [-token / 64 for token in ids]),
        array("q", [1 + token % 2 for token in ids]),
        [likeliest(token) for token in ids] if top_k else [],
    )


def prompt_ids(text: str) -> list[int]:
    """Ids of a text under the tokenizer that stands in where the model has none: its bytes."""
    return list(text.encode())


class _Sample:
    __slots__ = ("ids", "reported", "wanted")

    def __init__(self, row: int, wanted: list[int], known: list[int]) -> None:
        self.wanted = wanted
        self.ids = known
        self.reported = len(known)
        if known != wanted[: len(known)]:
            raise EngineError(f"row {row} came with partial output that is not its own")

    def advance(self, tokens: int | None) -> int:
        more = self.wanted[len(self.ids) :][:tokens]
        self.ids += more
        return len(more)

    @property
    def done(self) -> bool:
        return len(self.ids) == len(self.wanted)


class _Live:
    __slots__ = ("added", "request", "samples", "started")

    def __init__(self, request: Request, wanted: list[list[int]]) -> None:
        known = [request.output_token_ids, *request.fork_token_ids]
        known += [[] for _ in wanted[len(known) :]]
        self.request = request
        self.samples = [_Sample(request.request_id, *one) for one in zip(wanted, known, strict=False)]
        self.added = self.started = time.monotonic()


@dataclass(slots=True)
class _Totals:
    computed: int = 0
    sampled: int = 0


class FakeCore:
    """What the worker loop knows as an engine; also its own `scheduler`."""

    max_model_len = MAX_MODEL_LEN

    def __init__(self, behaviour: Behaviour, max_num_seqs: int) -> None:
        self.behaviour = behaviour
        self.counters = _Totals()
        self.stats = SchedulerStats(pool_total=max_num_seqs, block_size=16)
        self.on_step: Callable[[list[int]], None] | None = None
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[_Live] = deque()
        self._running: dict[int, _Live] = {}
        self._by_row = {row: f for f in behaviour.faults for row in f.rows}
        self._by_tokens = [f for f in behaviour.faults if f.after_tokens is not None]

    @property
    def scheduler(self) -> FakeCore:
        return self

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, request: Request) -> Output | None:
        sampling = request.sampling
        row, prompt = request.request_id, request.prompt_token_ids
        samples = range(sampling.n if request.task is Task.GENERATE else 0)
        wanted = [
            answer(sampling.seed, row, prompt, sampling.max_tokens, self.behaviour.tokens, sample)
            for sample in samples
        ]
        self._waiting.append(_Live(request, wanted))
        return None

    def step(self) -> list[Output]:
        self._admit()
        if not self._running:
            return []
        if self.on_step is not None:
            self.on_step(list(self._running))
        if self.behaviour.step_seconds:
            time.sleep(self.behaviour.step_seconds)
        faulty = self._by_row.keys() & self._running.keys() if self._by_row else ()
        stalled = {row for row in sorted(faulty) if self._stalls(self._by_row[row])}
        outputs = [out for live in list(self._running.values()) if (out := self._advance(live, stalled))]
        for fault in self._by_tokens:
            if self.counters.sampled >= (fault.after_tokens or 0):
                self._fault(fault)
        return outputs

    def partials(self) -> list[tuple[int, int, int, list[int]]]:
        news = []
        for row, live in self._running.items():
            for i, sample in enumerate(live.samples):
                if len(sample.ids) > sample.reported:
                    news.append((row, i, sample.reported, sample.ids[sample.reported :]))
                    sample.reported = len(sample.ids)
        return news

    def fail(self, row: int, error: RowError) -> Output:
        live = self._running.pop(row)
        return Output(row, prompt_tokens=len(live.request.prompt_token_ids), error=error)

    def drop_unstarted(self) -> None:
        self._waiting.clear()

    def close(self) -> None:
        self._running.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            live = self._waiting.popleft()
            self._running[live.request.request_id] = live
            live.started = time.monotonic()
            self.stats.prompt_tokens += len(live.request.prompt_token_ids)
            self.stats.cached_tokens += len(live.request.prompt_token_ids) // 4
            self.counters.computed += len(live.request.prompt_token_ids)
        self.stats.pool_used = len(self._running)

    def _advance(self, live: _Live, stalled: set[int]) -> Output | None:
        request = live.request
        row = request.request_id
        if row in self._by_row and self._by_row[row].do in _ROW_ERRORS:
            del self._running[row]
            fault = self._by_row[row]
            error = RowError(ErrorClass(fault.do), f"row {row}: {fault.message}")
            return Output(row, prompt_tokens=len(request.prompt_token_ids), error=error)
        if row in stalled:
            return None
        for sample in live.samples:
            self.counters.sampled += sample.advance(self.behaviour.tokens_per_step)
        if not all(sample.done for sample in live.samples):
            return None
        del self._running[row]
        return self._finished(live)

    def _finished(self, live: _Live) -> Output:
        request = live.request
        if request.task is not Task.GENERATE:
            return self._read(live)
        return Output(
            request.request_id,
            samples=tuple(_sample(sample.ids, request.sampling) for sample in live.samples),
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=sum(len(sample.ids) for sample in live.samples),
            # Something that depends on scheduling, and so must not reach the results.
            cached_tokens=self.counters.sampled % 7,
            queue_seconds=live.started - live.added,
            decode_seconds=time.monotonic() - live.started,
            reasoning_tokens=len(live.samples) if request.sampling.reasoning else 0,
            control_tokens=request.control_tokens,
            scores=_known_scores(request),
        )

    def _read(self, live: _Live) -> Output:
        """What a task other than generating gives: a function of the prompt alone."""
        request = live.request
        output = Output(
            request.request_id,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=self.counters.sampled % 7,
            truncated_tokens=request.truncated_tokens,
            queue_seconds=live.started - live.added,
        )
        output.scores = _known_scores(request)
        if request.scoring is not None:
            return output
        if request.task is Task.EMBED:
            output.embedding = array("f", [sum(request.prompt_token_ids), len(request.prompt_token_ids)])
        else:
            share = len(request.prompt_token_ids) % 8 / 8
            output.classification = Classification((("no", 1 - share), ("yes", share)))
        return output

    def _stalls(self, fault: Fault) -> bool:
        if fault.do == "stall":
            return fault.until is None or not Path(fault.until).exists()
        self._fault(fault)
        return False

    def _fault(self, fault: Fault) -> None:
        if fault.do not in _ROW_ERRORS and _once_more(fault, self.behaviour):
            commit(fault)


def _sample(ids: list[int], sampling: SamplingParams) -> Sample:
    full = len(ids) == sampling.max_tokens
    text: str = text_of(ids)
    reasoning = None
    if sampling.reasoning is not None:
        reasoning, _, text = text.partition(" ")
    scores = None if sampling.logprobs is None else scores_of(ids, sampling.logprobs)
    reason = FinishReason.LENGTH if full else FinishReason.STOP
    return Sample(ids, text, reason, reasoning=reasoning, scores=scores)


def _known_scores(request: Request) -> TokenScores | None:
    """Of the tokens that the request came with, where they are wanted."""
    wanted = [one.scoring for one in (request, *request.following) if one.scoring is not None]
    targets = [target for scoring in wanted for target in scoring.targets]
    return scores_of(targets, wanted[0].top_k) if wanted else None


def _once_more(fault: Fault, behaviour: Behaviour) -> bool:
    """Whether a fault happens again; counted on disk, because the process may not live to tell."""
    if fault.times is None and not fault.spare:
        return True
    if behaviour.state is None:
        raise ValueError("Fault.times needs Behaviour.state")
    name = hashlib.blake2b(repr(fault).encode(), digest_size=8).hexdigest()
    fd = os.open(Path(behaviour.state, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        before = os.fstat(fd).st_size
        os.write(fd, b"x")
        return before >= fault.spare and (fault.times is None or before - fault.spare < fault.times)
    finally:
        os.close(fd)


def commit(fault: Fault) -> None:
    """Let it go wrong."""
    if fault.do == "fatal":
        raise _FATAL[fault.exit_code](fault.message)
    if fault.do == "raise":
        raise RuntimeError(fault.message)
    print(fault.message, file=sys.stderr, flush=True)
    if fault.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.do == "segfault":
        ctypes.string_at(0)
    elif fault.do == "exit":
        os._exit(fault.exit_code)
    elif fault.do == "hang":
        time.sleep(1 << 20)
    else:
        raise ValueError(f"an unknown fault: {fault.do}")


class _NoTokenizer:
    """Stands in for a transformers tokenizer: an id for each byte, turns joined by newlines."""

    chat_template = "{{ messages | map(attribute='content') | join('\n') }}"
    special_tokens_map: Mapping[str, str] = {}
    eos_token_id = 0
    bos_token_id = None

    def __init__(self) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        characters = {chr(byte): byte for byte in printable}
        characters |= {chr(256 + n): byte for n, byte in enumerate(others)}
        self.backend_tokenizer = Backend(models.BPE(vocab=characters, merges=[]))
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        self.backend_tokenizer.decoder = decoders.ByteLevel()

    def get_chat_template(self, template: str | None, tools: Any = None) -> str:
        return template or self.chat_template


class _OnlyIds(Tokenizer):
    """For prompts that are token ids already: makes no text of ids and no ids of text."""

    def __init__(self) -> None:
        self.special_tokens: dict[str, int] = {}
        self.vocab_size = VOCABULARY


def build(config: Mapping[str, Any]) -> ReadyEngine:
    """The engine of a job, as its configuration and the environment ask."""
    behaviour = Behaviour.from_json(os.environ.get(VARIABLE, "{}"))
    spec = PromptSpec.from_dict(config["prompt"])
    renderer = PromptRenderer(spec, _tokenizer(spec, Path(config["model"])))
    renderer.probe()
    time.sleep(behaviour.load_seconds)
    for fault in behaviour.faults:
        if fault.at_start and _once_more(fault, behaviour):
            commit(fault)
    max_num_seqs = config["engine"].get("max_num_seqs") or 256
    length = MAX_MODEL_LEN + (os.getpid() if behaviour.unpinned else 0)
    pinned = {"dtype": "float32", "max_model_len": length, "generation_defaults": {}}
    return ReadyEngine(
        core=FakeCore(behaviour, max_num_seqs),
        renderer=renderer,
        requests=TaskRequests(Task(spec.task), renderer.tokenizer, length),
        sampling=RowSampling(config["sampling"], {}, spec.per_row),
        max_num_seqs=max_num_seqs,
        pinned={**pinned, **(config.get("pinned") or {}), **behaviour.pinned},
        facts={"fake": 1},
        notes=list(behaviour.notes),
    )


def _tokenizer(spec: PromptSpec, model: Path) -> Tokenizer:
    if spec.mode == "tokens":
        return _OnlyIds()
    if (model / "tokenizer.json").exists():
        return Tokenizer.load(str(model))
    return Tokenizer(_NoTokenizer())


def save_model(folder: Path) -> Path:
    """A model folder as the checks of a job want it, with nothing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def launcher(behaviour: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """What starts fake workers.

    Args:
        behaviour: JSON-able arguments of `Behaviour`; None for what the environment says.
    """
    told = [] if behaviour is None else [f"{VARIABLE}={json.dumps(behaviour)}"]
    # The same batchgen as in this process, wherever it came from.
    path = f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"
    return partial(launch_worker, command=("env", path, *told, sys.executable, str(Path(__file__))))


if __name__ == "__main__":
    # No model runs here, and transformers would load all of torch, for seconds, beside a tokenizer.
    sys.modules["torch"] = None  # type: ignore[assignment]
    serve(build)
