"""Cross entropy of many classes, which reads the logits as they are and keeps nothing as wide.

    loss[m] = logsumexp(x[m]) - x[m, label[m]]
    grad[m] = (softmax(x[m]) - onehot(label[m])) * by_loss[m]

PyTorch makes FP32 log-probabilities of all classes, and their gradient, before it comes to the
gradient of the logits: at 8192 tokens and 32000 classes 1 GB each, and the logits in FP32 besides.
Here a forward reads the logits once and keeps one number a row; backward reads them again, and
writes their gradient. Arithmetic is FP32; a gradient is rounded once, when it is written.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp8patch.ops.kernels import load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels() -> Any:
    """The Triton kernels, or None where there is no Triton."""
    return load("cross_entropy", "losses run as plain PyTorch")


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of rows, and their mean.

    Args:
        logits: [M, V] in FP32, BF16 or FP16; classes are neighbours in memory, rows need not be.
        labels: [M], int64. Of a label that is neither a class nor `ignored`, loss and
            gradient are nan.
        ignored: The label of rows that have no loss.

    Returns:
        losses FP32 [M], 0 where ignored; lse FP32 [M], which backward wants; FP32 [3]: the sum of
        the losses, how many rows have one, and 1 if all labels are as they should be, else 0.
    """
    if logits.is_cuda and logits.numel() and (found := kernels()) is not None:
        return found.cross_entropy(logits, labels, ignored)  # type: ignore[no-any-return]
    x = logits.float()
    has_loss = labels != ignored
    chosen = torch.where(has_loss, labels, 0)
    known = (chosen >= 0) & (chosen < x.shape[1])
    top = x.amax(1)
    # Where all is -inf there is nothing to subtract. (inf becomes nan: it has no gradient either.)
    top = torch.where(top > -math.inf, top, 0.0)
    lse = top + (x - top.unsqueeze(1)).exp().sum(1).log()
    picked = x.gather(1, torch.where(known, chosen, 0).unsqueeze(1)).squeeze(1)
    losses = torch.where(known, lse - picked, float("nan"))
    losses = torch.where(has_loss, losses, 0.0)
    sums = losses.sum(), has_loss.sum().float(), known.all().float()
    return losses, lse, torch.stack(sums)


def cross_entropy_backward(
    logits: Tensor, labels: Tensor, lse: Tensor, by_loss: Tensor, ignored: int
) -> Tensor:
    """The gradient of the logits.

    Args:
        logits, labels, lse, ignored: What the forward was given, and returned.
        by_loss: FP32, the gradient of each row's loss: [M], or a scalar for all rows.

    Returns:
        [M, V] like the logits; zero where ignored. Where V is no multiple of 16, zeros lie between
        its rows, so that a GEMM can read it as if it were (`with_zeros`).
    """
    grad = _backward(logits, labels, lse, by_loss, ignored)
    _last[:] = [StorageWeakRef(grad.untyped_storage()), _place(grad)]
    return grad


def with_zeros(grad: Tensor, multiple: int) -> Tensor | None:
    """[M, V up to a multiple of 8 or 16], zeros behind V: the memory of the last gradient that
    `cross_entropy_backward` has made, if `grad` [M, V] lies there."""
    width = -(-grad.shape[1] // multiple) * multiple
    if not _last or grad.stride(0) < width or _last[1] != _place(grad):
        return None
    # (While it is referred to, however weakly, no other storage has its address.)
    if _last[0].cdata != grad.untyped_storage()._cdata or _last[0].expired():
        return None
    return grad.as_strided((grad.shape[0], width), (grad.stride(0), 1))


def _place(grad: Tensor) -> tuple[Any, ...]:
    # (A part of the gradient, as of two heads side by side, has its neighbours behind it.)
    return grad.shape, grad.stride(), grad.storage_offset()


# Of the storage of the gradient that was made last, for who comes next in backward; and its place.
_last: list[Any] = []


def _backward(logits: Tensor, labels: Tensor, lse: Tensor, by_loss: Tensor, ignored: int) -> Tensor:
    width = width_of(logits)
    if logits.is_cuda and logits.numel() and (found := kernels()) is not None:
        return found.cross_entropy_backward(  # type: ignore[no-any-return]
            logits, labels, lse, by_loss, ignored, width
        )
    x = logits.float()
    has_loss = labels != ignored
    grad = (x - lse.unsqueeze(1)).exp()
    classes = torch.arange(x.shape[1], device=x.device)
    grad -= (labels.unsqueeze(1) == classes).float()
    known = (labels >= 0) & (labels < x.shape[1])
    grad *= torch.where(known, by_loss, float("nan")).unsqueeze(1)
    grad = torch.where(has_loss.unsqueeze(1), grad, 0.0)
    whole = logits.new_zeros(logits.shape[0], width)
    whole[:, : x.shape[1]] = grad
    return whole[:, : x.shape[1]]


def width_of(logits: Tensor) -> int:
    """Elements of a row: a multiple of 16, which Triton has to know of to store several at once."""
    return -(-logits.shape[1] // 16) * 16
