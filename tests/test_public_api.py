"""The names of `import fp8patch`: lazy, complete, and none hidden by a submodule."""

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import fp8patch

SOURCE = Path(fp8patch.__file__)
NAMES = fp8patch._PUBLIC


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_public_name_resolves(name: str) -> None:
    module = NAMES[name]
    assert getattr(fp8patch, name) is getattr(importlib.import_module(module), name)


def test_all_is_complete_and_sorted_like_dir() -> None:
    assert set(fp8patch.__all__) == {*NAMES, "__version__"}
    assert set(fp8patch.__all__) <= set(dir(fp8patch))


def test_no_public_name_is_a_submodule() -> None:
    # Importing the submodule would replace the name: fp8patch.x would be one thing on first use
    # and another on the second.
    submodules = {p.stem for p in SOURCE.parent.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert not submodules & set(fp8patch.__all__)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == NAMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="fp8patch.*has no attribute 'convrt_model'"):
        _ = fp8patch.convrt_model


def test_import_star_and_the_version() -> None:
    assert importlib.metadata.version("fp8patch") == fp8patch.__version__


def test_a_name_is_loaded_when_it_is_used_and_only_then() -> None:
    code = (
        "import sys, fp8patch\n"
        "assert 'fp8patch.recipe' not in sys.modules\n"
        "fp8patch.Recipe()\n"
        "assert 'Recipe' in vars(fp8patch) and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
