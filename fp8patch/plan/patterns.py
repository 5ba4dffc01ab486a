"""Which candidates a user's patterns choose, and what to say when a pattern chooses none.

A pattern is a glob (`fnmatch`, case-sensitive; `*` also crosses dots) over a dotted module path. It
chooses a module when it matches the whole path or that of a module around it: `model.layers.0` is
everything in block 0, and not `model.layers.01`.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8patch.errors import PlanError

__all__ = ["Selection", "check_patterns", "logical_path", "matches"]

# What wrappers put into a path: DDP, torch.compile, FSDP1, checkpoint wrappers, PEFT.
_WRAPPERS = re.compile(
    r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    r"|base_layer|original_module|modules_to_save\.[^.]+)(?:\.|$)"
)


def logical_path(path: str) -> str:
    """`path` without the components that wrappers add, as the unwrapped model would name it."""
    return _WRAPPERS.sub("", path).rstrip(".")


def matches(pattern: str, paths: Iterable[str]) -> bool:
    """Whether `pattern` chooses a module known by any of these paths."""
    return any(
        fnmatchcase(prefix, pattern)
        for path in paths
        for name in {path, logical_path(path)}
        for prefix in _prefixes(name)
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """The user's patterns: `only` restricts, `skip` adds skips, `include` lifts default skips.

    `override` are those of the recipe's overrides, which change how a layer computes.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    override: tuple[str, ...] = ()

    def overridden_by(self, paths: Iterable[str]) -> tuple[str, ...]:
        """The recipe's overrides that choose these paths, in the recipe's order."""
        return tuple(pattern for pattern in self.override if matches(pattern, paths))

    def skipped_by(self, paths: Iterable[str]) -> str | None:
        """The first `skip` pattern that chooses these paths."""
        return next((pattern for pattern in self.skip if matches(pattern, paths)), None)

    def selects(self, paths: Iterable[str]) -> bool:
        """Whether `only` leaves the module in."""
        return not self.only or any(matches(pattern, paths) for pattern in self.only)

    def includes(self, paths: Iterable[str]) -> bool:
        """Whether `include` chooses the module."""
        return any(matches(pattern, paths) for pattern in self.include)


def check_patterns(
    selection: Selection, candidates: Iterable[tuple[str, ...]], others: Mapping[str, str]
) -> None:
    """Raise for a pattern that does nothing.

    Args:
        selection: The patterns.
        candidates: All paths of each candidate.
        others: Class name by path of all modules that are no candidates. A `skip` pattern may match
            only these: what the user wants of them is the case already.

    Raises:
        PlanError: Naming the pattern and the nearest names.
    """
    known = list(candidates)
    for option in ("only", "skip", "include", "override"):
        for pattern in getattr(selection, option):
            if any(matches(pattern, paths) for paths in known):
                continue
            named = [path for path in others if matches(pattern, (path,))]
            if named and option == "skip":
                continue
            raise PlanError(
                _unmatched(
                    option,
                    pattern,
                    [p for paths in known for p in paths],
                    {path: others[path] for path in named},
                )
            )


def _unmatched(option: str, pattern: str, paths: list[str], named: Mapping[str, str]) -> str:
    if named:
        path, class_name = next(iter(named.items()))
        return (
            f'{option} pattern "{pattern}" matches nothing that can run in FP8: {path or "(root)"} '
            f"is a {class_name}. Remove the pattern, or name a module that the plan lists."
        )
    near = _nearest(pattern, paths)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    return (
        f'{option} pattern "{pattern}" matches none of the {len(paths)} candidates.{hint} '
        f"Patterns are globs over full module paths; the plan without it lists them."
    )


def _nearest(pattern: str, paths: list[str]) -> list[str]:
    """Up to three patterns or paths that exist and look like `pattern`, quoted."""
    # Blocks repeat the same names: compare with each generic path once, and show a real one.
    generic = {
        re.sub(r"(?<![^.])\d+(?![^.])", "*", logical_path(path)): path for path in reversed(paths)
    }
    literal = pattern.replace("*", "").replace("?", "").strip(".")
    last = literal.rsplit(".", 1)[-1]
    parts = {part for path in generic for part in path.split(".") if part not in ("*", "")}
    near = [f'"*.{part}"' for part in difflib.get_close_matches(last, sorted(parts), n=3)]
    if "." in literal:
        close = difflib.get_close_matches(
            re.sub(r"(?<![^.])\d+(?![^.])", "*", pattern), sorted(generic), n=2
        )
        near = [f'"{generic[path]}"' for path in close] + near
    return list(dict.fromkeys(near))[:3]


def _prefixes(path: str) -> list[str]:
    """ "a.b.c" as ["a", "a.b", "a.b.c"]; the root as [""]."""
    parts = path.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
