"""Kernels as the host code launches them, compiled without a GPU.

The operators are called on tensors without memory that say they are on a GPU, with a `Launcher`
that writes down what it was to launch instead; what Triton would specialise of that, and compile,
it is asked itself. So types, constants, options and tiles are the host code's own. Not under
Triton's interpreter (test_kernels_compile.py).
"""

import contextlib
import importlib
import io
import pkgutil
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget

import fp8patch.ops.triton
from fp8patch.ops.triton import column_sums, launch, packed

# Shared memory that a program can have, bytes.
_LARGEST_SHARED = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Bytes that a thread may spill and read again: those that are held to few registers, so that more
# run at once, do spill some. Measured: 72 at most, by Triton 3.8, and 48 by Triton 3.6.
_LARGEST_SPILL = 256
# ptxas 12.8 converts a pair of equal registers wrongly (F2FP merges garbage in).
_EQUAL_PAIR = re.compile(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+\S+,\s*(%\w+),\s*\1;")


class _Driver:
    """What Triton asks of a GPU before it launches anything."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # What is compiled is kept by device.

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch. `arguments`: tensors, as far as Triton looks at them, and numbers."""

    launcher: launch.Launcher
    variant: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    arch: int

    @property
    def kernel(self) -> Any:
        return self.launcher._kernel

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__}"

    def specialised(self) -> frozenset[str]:
        """What Triton compiles it for: types, what is known of values, constants, options."""
        return frozenset(f"{name}: {value}" for name, value in self._facts())

    def kinds(self) -> frozenset[str]:
        """The same without which addresses and sizes are known to be multiples of 16."""
        parts = (
            (name, value if value[0] == "constexpr" else value[0])
            for name, value in self._facts()
            if isinstance(value, tuple)
        )
        return frozenset(f"{name}: {value}" for name, value in parts)

    def _facts(self) -> list[tuple[str, Any]]:
        triton.runtime.driver.set_active(_Driver(self.arch))
        *_, binder = self.kernel.device_caches[self.arch]
        _, values, options = binder(*self.arguments, **self.options)
        return [*zip(self.kernel.arg_names, values, strict=True), *options.items()]

    def compile(self) -> tuple[Any, int]:
        """(the compiled kernel, bytes of registers that it spills)."""
        triton.runtime.driver.set_active(_Driver(self.arch))
        log = io.StringIO()
        with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            knobs.nvidia.dump_ptxas_log = True
            compiled = self.kernel.warmup(*self.arguments, grid=(1,), **self.options)
        spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
        assert spilled, f"ptxas says nothing of {self.name}: was it compiled before?"
        return compiled, sum(map(int, spilled))

    def check(self) -> None:
        """It compiles, and fits onto a GPU."""
        try:
            compiled, spilled = self.compile()
        except Exception as error:
            raise AssertionError(f"{self} does not compile: {error}") from error
        shared = compiled.metadata.shared
        assert shared <= _LARGEST_SHARED[self.arch], f"{self} takes {shared} bytes shared"
        assert spilled <= _LARGEST_SPILL, f"{self} spills {spilled} bytes"
        ptx = compiled.asm["ptx"]
        if self.options.get("launch_pdl"):
            # What the kernel before writes is there once it has waited.
            before = ptx.partition("griddepcontrol.wait")[0]
            assert before != ptx, f"{self} does not wait"
            assert not re.search(r"\b(ld|st|atom|red)\.global", before), f"{self} waits too late"
        pair = _EQUAL_PAIR.search(ptx)
        assert pair is None, f"{self} converts a pair of equal registers: {pair}"

    def __str__(self) -> str:
        return f"{self.name} on sm_{self.arch} with {sorted(self.specialised())}"


class _Pointer:
    """A tensor, as far as Triton looks at one."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._address = tensor.dtype, tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def _address(tensor: Tensor) -> int:
    # New memory begins at multiples of more than 16 bytes.
    return (1 << 20) + tensor.storage_offset() * tensor.itemsize


def _part(tensor: Tensor, index: Any) -> Tensor:
    # PyTorch's own asks CUDA for the current device.
    for dim, each in reversed(list(enumerate(index if isinstance(index, tuple) else (index,)))):
        if isinstance(each, slice):
            tensor = torch.ops.aten.slice(tensor, dim, each.start, each.stop)
        else:
            tensor = tensor.select(dim, each)
    return tensor


@contextlib.contextmanager
def recorded(arch: int = 90) -> Iterator[list[Launch]]:
    """What is launched inside, on a GPU of compute capability `arch` / 10. Tensors have no data."""
    found: list[Launch] = []

    def write_down(self, variant, blocks, tensors, numbers, constants, warps):
        assert blocks >= 1
        given = constants() if callable(constants) else constants
        arguments = (*map(_Pointer, tensors), *numbers)
        # A later launch gives the constants by position, and their names are forgotten.
        assert set(self._kernel.arg_names[len(arguments) :]) == set(given), self._kernel
        # As `Launcher._first` has it.
        options = {**given, "num_warps": warps, **self._options}
        found.append(Launch(self, variant, arguments, options, arch))

    with contextlib.ExitStack() as stack:
        for module in (launch, packed, column_sums):
            stack.enter_context(patch.object(module, "capability", lambda _: divmod(arch, 10)))
        stack.enter_context(patch.object(launch.Launcher, "__call__", write_down))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", _address, create=True))
        stack.enter_context(patch.object(FakeTensor, "__getitem__", _part, create=True))
        stack.enter_context(patch("fp8patch.ops.triton.norm.processors", lambda _: 132))
        stack.enter_context(FakeTensorMode())
        yield found


def covering(launches: list[Launch]) -> list[Launch]:
    """Some launches, in which all is that is in any: each type and each constant of each kernel.

    A form (forms.py) in one of the kernels that take it: there are many, they are the same
    function, and all else takes a second each.
    """
    by_kernel: dict[str, dict[frozenset[str], Launch]] = {}
    for each in launches:
        by_kernel.setdefault(each.name, {}).setdefault(each.kinds(), each)
    chosen: list[Launch] = []
    forms: set[str] = set()
    for found in by_kernel.values():
        missing = frozenset().union(*found) - forms
        while missing:
            best = max(found, key=lambda facts: len(facts & missing))
            missing -= best
            chosen.append(found[best])
            forms |= {fact for fact in best if fact.startswith("FORM: ")}
    return chosen


def check_compiles(launches: Iterable[Launch]) -> None:
    """Each of them."""
    launches = list(launches)
    assert launches
    for each in launches:
        each.check()


def one_each(launches: list[Launch]) -> list[Launch]:
    """The first of each kernel."""
    return list({each.name: each for each in reversed(launches)}.values())


def conflicts(launches: list[Launch]) -> list[str]:
    """Launches for which a launcher would take a kernel that was compiled for others."""
    known: dict[Any, Launch] = {}
    found = []
    for each in launches:
        first = known.setdefault((each.launcher, each.variant), each)
        differing = first.specialised() ^ each.specialised()
        if differing:
            found.append(f"{each.name}, variant {each.variant}: {sorted(differing)}")
    return found


def never_launched(launches: list[Launch]) -> list[str]:
    """Launchers that `launches` do without, and kernels that nothing launches or calls."""
    prefix = fp8patch.ops.triton.__name__ + "."
    modules = [
        importlib.import_module(prefix + each.name)
        for each in pkgutil.iter_modules(fp8patch.ops.triton.__path__)
    ]
    objects = {id(each): each for module in modules for each in vars(module).values()}.values()
    launchers = [each for each in objects if isinstance(each, launch.Launcher)]
    jitted = [each for each in objects if isinstance(each, triton.JITFunction)]
    # (Of Triton's own a module may hold some.)
    jitted = [each for each in jitted if each.fn.__module__.startswith(prefix)]
    assert launchers
    assert jitted
    used = {each.launcher for each in launches}
    missing = [each._kernel.fn.__name__ for each in launchers if each not in used]
    entries = [each._kernel for each in launchers]
    for each in jitted:
        call = re.compile(rf"\b{each.fn.__name__}\b")
        callers = (other for other in jitted if other is not each)
        if each not in entries and not any(call.search(other.src) for other in callers):
            missing.append(each.fn.__name__)
    return missing
