"""`make audit`: known vulnerabilities of what is installed, by pip-audit. Exit code 1 if there is any.

Where the advisories cannot be had, as without a network, it says what was not checked and exits with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

COMMAND = ("-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable")


def summary(dependencies: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """Lines for people and the exit code.

    Args:
        dependencies: `dependencies` of pip-audit's JSON: name, version and vulns, or skip_reason.
    """
    lines, checked = [], 0
    for one in dependencies:
        checked += "vulns" in one
        for found in one.get("vulns", ()):
            fixed = ", ".join(found.get("fix_versions", ())) or "no version yet"
            lines.append(f"{one['name']} {one['version']}: {found['id']}, fixed in {fixed}")
    vulnerable = bool(lines)
    lines.append(f"{checked} of {len(dependencies)} packages were checked")
    return lines, int(vulnerable)


def main() -> int:
    """Run pip-audit and print what it found."""
    done = subprocess.run([sys.executable, *COMMAND], capture_output=True, text=True, check=False)
    try:
        dependencies = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"nothing was checked: pip-audit could not ask for advisories ({last})")
        return 0
    lines, code = summary(dependencies)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
