"""An independent count of what casts to FP8 do, by ml_dtypes, from what hooks see of a model."""

from collections import defaultdict
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

FORMATS = {
    "input": ml_dtypes.float8_e4m3fn,
    "weight": ml_dtypes.float8_e4m3fn,
    "grad_output": ml_dtypes.float8_e5m2,
}


class Counted:
    """Counts of every converted module's inputs, weights and gradients (delayed scaling).

    Attributes:
        counts: {(path, role): [clipped, flushed, not finite, all]} so far.
        amax: The same, of the amax since `step` was called.
        steps: `(counts, amax, scales)` as they were at each call of `step`.
    """

    def __init__(self, model: Any) -> None:
        self.counts: dict[tuple[str, str], Any] = defaultdict(lambda: np.zeros(4, np.int64))
        self.amax: dict[tuple[str, str], float] = defaultdict(float)
        self.scales: dict[tuple[str, str], float] = {}
        self._weighed: set[str] = set()
        self.steps: list[Any] = []
        for path, module in model.named_modules():
            if hasattr(type(module), "_fp8_base") and hasattr(module, "in_features"):
                module.register_forward_hook(self._hook(path))

    def _hook(self, path: str) -> Any:
        def saw(module: Any, args: Any, output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            self._count((path, "input"), args[0], module._fp8_input_slot)
            if path not in self._weighed:  # once a step, however many micro-batches it has
                self._weighed.add(path)
                self._count((path, "weight"), module.weight, module._fp8_weight_slot)
            output.register_hook(
                lambda grad: self._count((path, "grad_output"), grad, module._fp8_grad_slot)
            )

        return saw

    def _count(self, key: tuple[str, str], tensor: Tensor, slot: Any) -> None:
        values = tensor.detach().float().cpu().numpy()
        finite = np.isfinite(values)
        largest = float(np.abs(values).max())
        dtype = FORMATS[key[1]]
        scale = np.float32(slot.scale.item())
        self.scales[key] = float(scale)
        if scale == 0:
            scale = np.float32(float(ml_dtypes.finfo(dtype).max)) / np.float32(largest)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = values * scale
            cast = scaled.astype(dtype).astype(np.float32)
        # Halfway to 65536, ml_dtypes rounds to inf; to saturate there is what rounding would do.
        self.counts[key] += [
            (finite & ~np.isfinite(cast) & (np.abs(scaled) != 61440.0)).sum(),
            (finite & (values != 0) & (cast == 0)).sum(),
            (~finite).sum(),
            values.size,
        ]
        self.amax[key] = float(np.maximum(self.amax[key], largest))

    def step(self) -> None:
        """An optimizer step is over."""
        counts = {key: count.tolist() for key, count in self.counts.items()}
        self.steps.append((counts, dict(self.amax), dict(self.scales)))
        self.amax.clear()
        self._weighed.clear()
