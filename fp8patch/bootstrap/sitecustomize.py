"""Reaches every process of a `fp8patch train` run: Python imports a `sitecustomize` when it starts.

The parent puts this folder, and nothing else, in front of PYTHONPATH. Every Python that the run
starts loads this file, most of them for nothing: it imports what the interpreter has loaded anyway,
and stays readable for old ones. Only where torch is imported does fp8patch come in, right after.

This is a folder and not a package: nobody should import it but the interpreter.
"""

import os
import sys

# Importing typing costs more than all of this file; type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The name of `fp8patch.train_options.ENV`, which is too much to import here.
_ENV = "FP8PATCH_TRAIN"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _ArmAfterTorch:
    """A finder in `sys.meta_path` that finds torch as the others do, and arms once it is loaded.

    Not wrapt's post-import hooks: importing wrapt costs more than all of this file.
    """

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != "torch":
            return None
        finders: list[Any] = list(sys.meta_path)
        for finder in finders:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                # A spec that is only asked for (`is_torch_available`) is never executed, and the
                # next question makes another one.
                if hasattr(spec.loader, "exec_module"):
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: "Any") -> None:
        # On the loader itself: a wrapper around it would be what `torch.__loader__` is for ever.
        execute = loader.exec_module

        def exec_module(module: "Any") -> None:
            del loader.exec_module
            sys.meta_path.remove(self)
            try:
                execute(module)
            except BaseException:
                sys.meta_path.insert(0, self)
                raise
            _arm()

        loader.exec_module = exec_module


def _arm() -> None:
    try:
        import importlib

        if "fp8patch" not in sys.modules:
            _load_package()
        inject = importlib.import_module("fp8patch.inject.patch")
    except Exception as error:
        # The script goes on as it would without us; the parent misses this process's report.
        sys.stderr.write(
            f"fp8patch: warning: this process is not patched, {sys.executable} cannot load "
            f"fp8patch: {type(error).__name__}: {error}\n"
        )
    else:
        inject.arm()


def _load_package() -> None:
    """Import the fp8patch that this file belongs to: what the parent says is what it understands.

    Its folder's parent does not go on `sys.path`, where the script would find what else is there.
    """
    from importlib.util import module_from_spec, spec_from_file_location

    folder = os.path.dirname(_HERE)
    spec = spec_from_file_location(
        "fp8patch", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["fp8patch"] = package = module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["fp8patch"]
        raise


def _start() -> None:
    # The script sees the path that it would see without us; its children have the variable.
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    if os.environ.get(_ENV):
        if "torch" in sys.modules:  # by a .pth file
            _arm()
        else:
            sys.meta_path.insert(0, _ArmAfterTorch())
    # The next sitecustomize on the path, in our place; what it raises is the interpreter's to tell.
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours


if __name__ == "sitecustomize":
    _start()
