"""Prints how much the state machines of the core have run."""

from __future__ import annotations

import pytest
from core_sim import executed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if executed["rules"]:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(executed.items()))
        terminalreporter.write_line(f"core state machines: {counts}")
