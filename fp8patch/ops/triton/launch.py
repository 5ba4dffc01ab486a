"""Launching a kernel for a few microseconds of CPU time.

`kernel[grid](...)` binds, inspects and hashes every argument each time, and its C launcher asks the
driver about every pointer: 30 to 60 us for a kernel of twenty arguments, where a small cast takes 5
us of GPU time. After a first such launch, `Launcher` calls the compiled kernel directly, with
addresses as integers.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs


def size_class(number: int) -> int:
    """What Triton specialises an integer on: being 1, a multiple of 16, or too large for 32 bits.

    A compiled kernel may be called with the sizes that it was compiled for, and these alone: each
    size must be in the `variant` that is given to `Launcher`.
    """
    return 1 if number == 1 else (16 if number % 16 == 0 else 0) + (number >> 31)


class Launcher:
    """Launches one kernel in all its variants.

    The kernel takes its tensors first, then its numbers, then its compile-time constants.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        variant: Hashable,
        blocks: int,
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
        constants: dict[str, Any],
        warps: int,
    ) -> None:
        """Launch `blocks` programs on the current stream of the tensors' device.

        Args:
            variant: Whatever the compiled code depends on: dtypes, constants, `warps`, the
                `size_class` of every size, and whether a tensor starts at a multiple of 16 bytes.
        """
        device = tensors[0].device.index
        key = (device, variant)
        known = self._compiled.get(key)
        if known is None or device != torch.cuda.current_device():
            self._first(key, device, blocks, tensors, numbers, constants, warps)
            return
        compiled, values = known
        stream = torch.cuda.current_stream(device).cuda_stream
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        addresses = [tensor.data_ptr() for tensor in tensors]
        metadata = compiled.packed_metadata
        compiled.run(
            blocks, 1, 1, stream, compiled.function, metadata, None, enter, leave,
            *addresses, *numbers, *values,
        )  # fmt: skip

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
        if device is None:  # The CPU interpreter.
            self._kernel[(blocks,)](*tensors, *numbers, **constants, num_warps=warps)
            return
        with torch.cuda.device(device):
            compiled = self._kernel[(blocks,)](*tensors, *numbers, **constants, num_warps=warps)
        self._compiled[key] = compiled, tuple(constants.values())
