"""Values of a plan as JSON holds them: of the right type, and in range.

Each raises ValueError with a clause that says what is wrong; KeyError where there is none.
"""

import math
from collections.abc import Mapping
from typing import Any


def typed(values: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value under `name`, which is of type `kind`."""
    value = values[name]
    # bool is an int, and true is no number of anything.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, not of type {kind.__name__}")
    return value


def whole(values: Mapping[str, Any], name: str, least: int = 0) -> int:
    """The integer under `name`, at least `least`."""
    number: int = typed(values, name, int)
    if not least <= number < 2**63:
        raise ValueError(f"{name} is {shown(number)}, not a number from {least} to 2^63")
    return number


def real(values: Mapping[str, Any], name: str) -> float:
    """The finite number under `name`, at least 0."""
    value = values[name]
    if isinstance(value, int) and not isinstance(value, bool) and value < 2**63:
        value = float(value)
    if not isinstance(value, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {shown(value)}, not a number of at least 0")
    return value


def shown(value: Any) -> str:
    """`value` as a message names it: cut where it is long."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # an integer of more digits than Python writes
        return "a huge number"
