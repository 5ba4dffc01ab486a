"""CUDA graphs: when a new generation of their memory may begin."""

import torch

__all__ = ["begin"]


def begin() -> bool:
    """An outermost training forward begins; returns whether it may replay CUDA graphs."""
    if not torch.cuda.is_available():
        return False
    torch.compiler.cudagraph_mark_step_begin()
    return True
