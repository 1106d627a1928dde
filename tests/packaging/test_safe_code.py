"""The product cannot run what it reads: no pickle, no eval, no unsafe loader. And the audit's summary."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = [*sorted((ROOT / "batchgen").rglob("*.py")), *sorted((ROOT / "kernels").rglob("*.py"))]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "dbm"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "torch.load",
    "numpy.load",
    "np.load",
}
"""`subprocess` is not here, but `shell=True` is looked for."""


def faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything in a module that could run data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.split(".")[0] in MODULES:
                yield node.lineno, node.module
        elif isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name = ast.unparse(node.func)
            if name in CALLS and not (name == "torch.load" and _is(given.get("weights_only"), True)):
                yield node.lineno, name
            if _is(given.get("shell"), True) or _is(given.get("trust_remote_code"), True):
                yield node.lineno, f"{name} with shell or trust_remote_code"
            if _is(given.get("allow_pickle"), True):
                yield node.lineno, f"{name} with allow_pickle"


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("file", PRODUCT, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_data_becomes_code(file: Path) -> None:
    assert list(faults(ast.parse(file.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "import a, dill.x",
        "eval(x)",
        "yaml.load(x, Loader=yaml.SafeLoader)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_the_search_finds_each_kind(code: str) -> None:
    assert list(faults(ast.parse(code)))


def test_what_is_safe_is_left_alone() -> None:
    assert not list(faults(ast.parse("torch.load(x, weights_only=True)\nmodel.eval()\nyaml.safe_load(x)\n")))


def test_the_audit_says_what_was_found_and_what_was_not_checked() -> None:
    spec = importlib.util.spec_from_file_location("audit", Path(__file__).with_name("audit.py"))
    assert spec is not None
    assert spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    skipped = {"name": "a", "skip_reason": "not found"}
    sound = {"name": "b", "version": "1", "vulns": []}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}, {"id": "CVE-2"}]}
    assert audit.summary([skipped, sound]) == (["1 of 2 packages were checked"], 0)
    assert audit.summary([bad]) == (
        ["c 2: CVE-1, fixed in 3", "c 2: CVE-2, fixed in no version yet", "1 of 1 packages were checked"],
        1,
    )
