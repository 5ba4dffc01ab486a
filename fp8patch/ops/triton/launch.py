"""Launching a kernel for little CPU time.

`kernel[grid](...)` binds, inspects and hashes every argument each time, and its C launcher asks the
driver about every pointer: with twenty arguments that takes longer than a small cast does on the
GPU. After a first such launch, `Launcher` calls the compiled kernel directly, with addresses as
integers.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

# torch.cuda.current_stream builds an object; this is the handle that it would hold.
_raw_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@cache
def capability(device: int | None) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) on the CPU, under the interpreter."""
    return (0, 0) if device is None else torch.cuda.get_device_capability(device)


def blocks_of(size: int, block: int) -> int:
    """How many blocks cover `size`. (`triton.cdiv` is a jitted function: slow.)"""
    return -(-size // block)


def size_class(number: int) -> int:
    """What Triton specialises an integer on: being 1, a multiple of 16, or too large for 32 bits.

    A compiled kernel may be called with the sizes that it was compiled for, and these alone: each
    size must be in the `variant` that is given to `Launcher`.
    """
    return -1 if number == 1 else (0 if number % 16 else 16) + (number >> 31)


def empty_matrix(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised contiguous matrix; `torch.empty` takes longer to read its arguments."""
    return torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=device)


class Launcher:
    """Launches one kernel in all its variants.

    The kernel takes its tensors first, then its numbers, then its compile-time constants.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        """`options` are those of Triton's compiler: `maxnreg`, `launch_pdl`."""
        self._kernel, self._options = kernel, options
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        variant: Hashable,
        blocks: int,
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
        constants: dict[str, Any] | Callable[[], dict[str, Any]],
        warps: int,
    ) -> None:
        """Launch `blocks` programs on the current stream of the tensors' device.

        Args:
            variant: Whatever the compiled code depends on: dtypes, constants, `warps`, the
                `size_class` of every size, and whether a tensor starts at a multiple of 16 bytes.
            constants: A function is only called the first time.
        """
        device = tensors[0].device.index
        key = (device, variant)
        known = self._compiled.get(key)
        if known is None or device != _current_device():
            given = constants() if callable(constants) else constants
            self._first(key, device, blocks, tensors, numbers, given, warps)
            return
        compiled, values = known
        compiled.run(
            blocks,
            1,
            1,
            _raw_stream(device),
            compiled.function,
            compiled.packed_metadata,
            None,
            knobs.runtime.launch_enter_hook,
            knobs.runtime.launch_exit_hook,
            *[tensor.data_ptr() for tensor in tensors],
            *numbers,
            *values,
        )

    def _first(
        self,
        key: Hashable,
        device: int | None,
        blocks: int,
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
        constants: dict[str, Any],
        warps: int,
    ) -> None:
        launch = self._kernel[(blocks,)]
        if device is None:  # The CPU interpreter.
            launch(*tensors, *numbers, **constants, num_warps=warps)
            return
        with torch.cuda.device(device):
            compiled = launch(*tensors, *numbers, **constants, num_warps=warps, **self._options)
        self._compiled[key] = compiled, tuple(constants.values())
