"""What the scripts that check a GPU share: results, noted and printed as they come."""

from collections.abc import Callable
from typing import Any

rows: list[dict[str, Any]] = []
failures: list[str] = []


def check(name: str, ok: bool, detail: str) -> None:
    """Note one result; a failure is counted and printed at once."""
    rows.append({"check": name, "ok": ok, "detail": detail})
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", flush=True)
    if not ok:
        failures.append(name)


def guarded(function: Callable[[], None]) -> None:
    """Run one group of checks; an exception is a failure of the group, not the end."""
    try:
        function()
    except Exception as error:
        check(function.__name__, False, f"{type(error).__name__}: {error}"[:600])
