"""Who may import whom, and who may import what: read off the source, lazy imports included."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fp8patch"

# A file imports from rows above its own, or from entries to its left in its own row; files of one
# entry (a folder) import each other freely, as long as nothing goes round in a circle. A file that
# is named itself is not of its folder's entry.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors.py", "messages.py"),
    (
        "hardware.py",
        "recipe_yaml.py",
        "recipe_fields.py",
        "recipe_overrides.py",
        "recipe.py",
        "numerics.py",
        "rates.py",
        "roofline.py",
        "recipe_facts.py",
        "compiler.py",
        "structures.py",
        "steps.py",
        "train_options.py",
        "child_python.py",
        "output_files.py",
    ),
    ("ops/*",),
    (
        "readback.py",
        "slots.py",
        "observation.py",
        "optimizer_hook.py",
        "owners.py",
        "late.py",
        "scaling.py",
        "input_cache.py",
        "regions.py",
        "backward.py",
        "deferred.py",
        "fused_loss.py",
        "roots.py",
        "amp.py",
    ),
    ("modules/*",),
    ("plan/*", "plan/model.py"),
    # What conversion installs: a converted model's own `save_pretrained` writes the sidecar.
    (
        "checkpoint/checks.py",
        "checkpoint/workspace.py",
        "checkpoint/sidecar.py",
        "checkpoint/ranks.py",
        "checkpoint/state.py",
        "checkpoint/hooks.py",
        "convert.py",
    ),
    (
        "checkpoint/*",
        "checkpoint/save_load.py",
        "blocks/*",
        "blocks/compiled.py",
        "export/*",
        "export/directory.py",
        "inspect/metrics.py",
        "bench/*",
        "inspect/*",
        "report_*.py",
        "bench/run.py",
        "doctor/*",
        "doctor/examine.py",
        "inject/*",
        "inject/patch.py",
        "demo_*.py",
        "demo.py",
    ),
    ("bootstrap/*", "launch_*.py", "launch.py", "cli/*"),
    ("__init__.py", "__main__.py"),
)

# Third-party package -> files that may import it, wherever in the file. Others are free.
FENCES: dict[str, tuple[str, ...]] = {
    "accelerate": ("checkpoint/*", "doctor/peers.py", "inject/*"),
    # No dependency of ours: who draws does without, or says so.
    "matplotlib": ("output_files.py", "report_picture.py"),
    "peft": (),
    "rich": ("cli/*",),
    "safetensors": ("checkpoint/*",),
    # Importing it patches Inductor.
    "torchao": ("bench/contenders.py", "export/torchao.py"),
    "transformers": (
        "modules/conv1d.py",
        "convert.py",
        "checkpoint/*",
        "bench/workloads.py",
        "doctor/peers.py",
        "inject/*",
        "demo_*.py",
        "demo.py",
        "cli/*",
    ),
    "triton": ("ops/triton/*",),
    "typer": ("cli/*",),
    "wrapt": ("checkpoint/hooks.py", "inject/*"),
    "yaml": ("recipe_yaml.py",),
}

# Importing these loads no torch, neither directly nor through another file of ours.
WITHOUT_TORCH = (
    "errors.py",
    "messages.py",
    "hardware.py",
    "recipe_yaml.py",
    "recipe.py",
    "rates.py",
    "roofline.py",
    "recipe_facts.py",
    "train_options.py",
    "output_files.py",
    "child_python.py",
    "bootstrap/sitecustomize.py",
    "inspect/advice.py",
    "inspect/run.py",
    "inspect/slots.py",
    "inspect/source.py",
    "inspect/tune.py",
    "report_data.py",
    "report_page.py",
    "report_picture.py",
    "launch_signals.py",
    "launch.py",
    "doctor/environment.py",
    "doctor/machine.py",
    "doctor/peers.py",
    "doctor/examine.py",
    "cli/__init__.py",
    "cli/doctor.py",
    "cli/recipes.py",
    "cli/train.py",
    "cli/tune.py",
    "__init__.py",
)


@dataclass(frozen=True)
class Import:
    """One imported module, as `fp8patch.ops.gemm` or `torch.nn`."""

    module: str
    line: int
    lazy: bool
    typing_only: bool


def imports_of(source: str, known: frozenset[str]) -> list[Import]:
    """Every import of a source text; `known` are the package's own dotted modules."""
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(a.name, node.lineno, lazy, typing_only) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                # `from fp8patch import hardware` imports the submodule, not the root.
                full = f"{base}.{alias.name}"
                if base == "fp8patch" and alias.name == "__version__":
                    continue  # a constant: the root loads nothing at import
                found.append(
                    Import(full if full in known else base, node.lineno, lazy, typing_only)
                )
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, lazy, True)
            for child in node.orelse:
                visit(child, lazy, typing_only)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, lazy, typing_only)

    visit(ast.parse(source), False, False)
    return found


def dotted(file: str) -> str:
    parts = ["fp8patch", *file.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place(file: str) -> tuple[int, int] | None:
    """(row, column) of a file in LAYERS."""
    matching = [
        (entry != file, row, column)  # its own entry comes before a pattern
        for row, entries in enumerate(LAYERS)
        for column, entry in enumerate(entries)
        if fnmatch(file, entry)
    ]
    return min(matching)[1:] if matching else None


def violations(sources: dict[str, str]) -> list[str]:
    """What is wrong with a package, given as file -> source text."""
    modules = {dotted(file): file for file in sources}
    known = frozenset(modules)
    problems: list[str] = []
    graph: dict[str, set[str]] = {file: set() for file in sources}
    eager: dict[str, set[str]] = {file: set() for file in sources}
    loads_torch: set[str] = set()
    for file, source in sources.items():
        here = place(file)
        if here is None:
            problems.append(f"{file}: in no layer; add it to LAYERS")
            continue
        items = imports_of(source, known)
        # Each file of a folder pays for it. The command line's is the program itself.
        if file.endswith("/__init__.py") and file != "cli/__init__.py" and items:
            problems.append(f"{file}: holds imports; a folder's own file is its docstring")
        for item in items:
            where = f"{file}:{item.line}: "
            top = item.module.split(".")[0]
            if item.module.startswith("."):
                problems.append(f"{where}relative import")
            elif top == "fp8patch":
                target = modules.get(item.module)
                # The root resolves its names lazily, so its imports for type checkers are no edges.
                if file == "__init__.py" and item.typing_only:
                    continue
                if target is None:
                    problems.append(f"{where}{item.module} does not exist")
                    continue
                there = place(target)
                if there is not None and there != here and there > here:
                    problems.append(f"{where}imports {target}, which is above it")
                if target != file:
                    graph[file].add(target)
                    if not item.lazy and not item.typing_only:
                        eager[file].add(target)
            else:
                if not any(fnmatch(file, allowed) for allowed in FENCES.get(top, ("*",))):
                    problems.append(f"{where}{top} may be imported in {FENCES[top]} only")
                if top in ("torch", "transformers") and not item.lazy and not item.typing_only:
                    loads_torch.add(file)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append(f"import cycle: {' -> '.join(error.args[1])}")
    for file in WITHOUT_TORCH:
        for reached in closure(file, eager) if file in sources else ():
            if reached in loads_torch:
                problems.append(f"{file}: importing it loads torch, through {reached}")
    return problems


def closure(file: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [file]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo.extend(edges[current])
    return seen


def package_sources() -> dict[str, str]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {f.relative_to(PACKAGE).as_posix(): f.read_text(encoding="utf-8") for f in files}


def test_the_package_keeps_its_layers() -> None:
    problems = violations(package_sources())
    assert not problems, "\n".join(problems)


def test_only_the_command_line_prints() -> None:
    printed = [
        f"{file}:{node.lineno}"
        for file, source in package_sources().items()
        if not file.startswith("cli/")
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Name) and node.id == "print")
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.stdout")
    ]
    assert not printed, f"only cli/ writes to stdout: {printed}"


@pytest.mark.parametrize("file", WITHOUT_TORCH)
def test_importing_it_loads_no_torch(file: str) -> None:
    assert (PACKAGE / file).is_file(), f"{file} is gone: take it out of WITHOUT_TORCH"
    code = (
        f"import sys, {dotted(file)}\n"
        "heavy = {'torch', 'transformers', 'triton', 'accelerate'} & sys.modules.keys()\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


PLANTED = {
    "upward": ({"recipe.py": "from fp8patch.plan.walk import x", "plan/walk.py": ""}, "above it"),
    "upward, lazily": (
        {"recipe.py": "def f():\n    from fp8patch.plan import walk", "plan/walk.py": ""},
        "above it",
    ),
    "upward, for types": (
        {
            "recipe.py": "if TYPE_CHECKING:\n    from fp8patch.plan.walk import x",
            "plan/walk.py": "",
        },
        "above it",
    ),
    "rightward": ({"recipe.py": "import fp8patch.numerics", "numerics.py": ""}, "above it"),
    "rightward, in a folder": (
        {"plan/walk.py": "import fp8patch.plan.model", "plan/model.py": ""},
        "above it",
    ),
    "downward, in a folder of two rows": (
        {"checkpoint/state.py": "import fp8patch.checkpoint.files", "checkpoint/files.py": ""},
        "above it",
    ),
    "a folder that imports": (
        {"plan/__init__.py": "import fp8patch.plan.walk", "plan/walk.py": ""},
        "holds imports",
    ),
    "public name": (
        {"plan/walk.py": "from fp8patch import convert_model", "__init__.py": ""},
        "above",
    ),
    "cycle": (
        {"ops/a.py": "import fp8patch.ops.b", "ops/b.py": "def f():\n    import fp8patch.ops.a"},
        "cycle",
    ),
    "unknown file": ({"helpers.py": ""}, "in no layer"),
    "relative": ({"plan/walk.py": "from . import convert"}, "relative"),
    "missing": ({"plan/walk.py": "import fp8patch.nowhere"}, "does not exist"),
    "fence": ({"plan/walk.py": "def f():\n    import typer"}, "typer may be imported"),
    "no torch": ({"recipe.py": "import torch.nn"}, "loads torch"),
    "no torch, in a class body": ({"recipe.py": "class A:\n    import torch"}, "loads torch"),
    "no torch, in a try": (
        {"launch.py": "try:\n    import torch\nexcept E:\n    p"},
        "loads torch",
    ),
    "no torch, through another": (
        {"launch.py": "import fp8patch.plan.walk", "plan/walk.py": "import torch"},
        "through plan/walk.py",
    ),
}


@pytest.mark.parametrize(("sources", "problem"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(sources: dict[str, str], problem: str) -> None:
    found = violations(sources)
    assert len(found) == 1, found
    assert problem in found[0]


def test_what_is_allowed_passes() -> None:
    sources = {
        "errors.py": "",
        "hardware.py": "from fp8patch import errors\ndef f():\n    import torch",
        "recipe.py": "if TYPE_CHECKING:\n    import torch\nimport fp8patch.hardware",
        "ops/__init__.py": "'Words.'",
        "ops/b.py": "from fp8patch.ops import a",
        "ops/a.py": "import fp8patch.recipe\nfrom fp8patch import __version__",
        "__init__.py": "if TYPE_CHECKING:\n    from fp8patch.anything import x",
    }
    assert violations(sources) == []
