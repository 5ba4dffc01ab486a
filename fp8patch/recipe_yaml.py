"""Recipe files: YAML as a recipe needs it, and nothing that surprises.

YAML can do more than a recipe has use for, and much of that reads as something else than it says:
`010` is 8, `1:30` is 90, a key given twice counts once, an alias can unfold to gigabytes. All of it
is refused.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from fp8patch.errors import RecipeError

__all__ = ["MOST_BYTES", "read_yaml"]

# The longest built-in has 1.2 KiB, most of them comments.
MOST_BYTES = 64 << 10
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
# A field's own range is far below; Python refuses to read more than 4300.
_MOST_DIGITS = 18


def read_yaml(path: Path) -> Any:
    """What the file holds.

    Raises:
        FileNotFoundError: There is no such file.
        RecipeError: It cannot be read, is no regular file, too large, or not YAML of this kind.
    """
    text = _read(path)
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        if "alias" in str(getattr(error, "context", None)):
            problem += '; a pattern that starts with * is written in quotes, as "*.gate"'
        raise RecipeError(f"{path}: {where}not valid YAML: {problem}.") from None
    except RecursionError:
        raise RecipeError(f"{path}: not a recipe: nested too deeply.") from None
    except ValueError as error:  # of a date, for one: 2024-13-45
        raise RecipeError(f"{path}: not valid YAML: {error}.") from None


def _read(path: Path) -> str:
    try:
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            what = "a folder" if path.is_dir() else "not a regular file"
            raise RecipeError(f"{path}: the recipe cannot be read: it is {what}.")
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(f"{path}: the recipe cannot be read: {reason}.") from None
    if len(data) > MOST_BYTES:
        raise RecipeError(
            f"{path}: the recipe cannot be read: it is larger than {MOST_BYTES >> 10} KiB, and "
            "a recipe is a few lines. Check the path."
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: the recipe cannot be read: it is not UTF-8 text.") from None


class _Loader(yaml.SafeLoader):
    """YAML without what a recipe has no use for."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            mark = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise _error(
                f"{mark}{event.anchor} is an alias or anchor, which a recipe needs none of; "
                "write the value out, or quote it",
                event.start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            text = str(key.value)
            if text in seen:
                raise _error(f"{text!r:.60} is given twice", key.start_mark)
            seen.add(text)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        if not _INTEGER.fullmatch(text) or len(text) > _MOST_DIGITS:
            raise _error(
                f"{text:.40} is not a plain whole number; write its decimal digits, without a "
                "leading 0, : or _, or quote it if it is a text",
                node.start_mark,
            )
        return int(text)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = str(self.construct_scalar(node))
        if ":" in text or "_" in text:
            raise _error(f"{text:.40} is not a plain decimal number", node.start_mark)
        return super().construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(
        f"tag:yaml.org,2002:{_kind}", getattr(_Loader, f"construct_yaml_{_kind}")
    )


def _error(problem: str, mark: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)
