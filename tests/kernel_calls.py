"""Calls of every operator that has a kernel, on tensors that say they are on a GPU.

For compiled_kernels.py. A group is a function of a `Case`; what an operator can be asked for (its
forms) is read from the operator's own tables.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops import (
    activation_grads,
    cross_entropy,
    fused,
    norm,
    norm_quantize,
    quantize,
    quantize_form,
    quantize_parts,
    transpose_again,
)
from fp8patch.ops.add_rows import add_rows

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
BOTH = (False, True)


@dataclass(frozen=True)
class Case:
    """What the matrices look like: `skip` elements from where their memory begins."""

    rows: int = 1024
    cols: int = 1024
    skip: int = 0
    dtype: torch.dtype = torch.bfloat16

    def matrix(self, dtype: torch.dtype | None = None, cols: int = 0) -> Tensor:
        """[rows, cols]"""
        cols = cols or self.cols
        flat = new(self.rows * cols + self.skip, dtype=dtype or self.dtype)
        return flat[self.skip :].view(self.rows, cols)


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def slot() -> tuple[Tensor, Tensor, Tensor]:
    """scale, amax, counts"""
    return new(), new(), new(4, dtype=torch.int64)


def casts(case: Case) -> None:
    """`quantize`, with all its flags."""
    for flags in itertools.product(BOTH, BOTH, BOTH, BOTH, BOTH):
        quantize.quantize_now(case.matrix(), *slot(), 448.0, *flags)


def formed(case: Case) -> None:
    """`quantize_form`, in all its forms."""
    for form in quantize_form.FORMS:
        y = case.matrix() if form == "silu_mul" or form.endswith("backward") else None
        for e5m2, sums in itertools.product(BOTH, BOTH):
            quantize_form._now(case.matrix(), y, form, *slot(), 448.0, e5m2, True, True, sums)


def stored(case: Case) -> None:
    """The forms of what is stored otherwise than it is cast."""
    for form, sums in itertools.product(quantize_form.STORED, BOTH):
        mask = case.matrix(torch.bool) if form.startswith("dropout") else None
        x = case.matrix(torch.float32 if "to_" in form else None)
        flags = True, True, True, sums
        quantize_form._now(x, mask, form, *slot(), 448.0, *flags, factor=1 / 0.9)


def parts(case: Case) -> None:
    """`quantize_parts`, of two and of three."""
    widths = (case.cols // 64 * 64, 64, 128)
    for number, sums in itertools.product((2, 3), BOTH):
        given = [case.matrix(cols=max(width, 64)) for width in widths[:number]]
        quantize_parts._now(given, *slot(), 57344.0, True, True, True, sums)


def gradients(case: Case) -> None:
    """`activation_grads`, in all its forms, and `transpose_again`."""
    for form, sums in itertools.product(activation_grads.GRADS, BOTH):
        gated = form == "silu_mul"
        if not (gated and sums):
            y, second = (case.matrix(), slot()) if gated else (None, (None, None, None))
            terms = *slot(), *second, 57344.0, True, True, sums
            activation_grads._now(case.matrix(), y, case.matrix(), form, new(), *terms)
    transpose_again._now(case.matrix(), new(), new())


def norms(case: Case) -> None:
    """`norm`, `norm_backward` and `norm_quantize`: LayerNorm, RMSNorm, Gemma's."""
    for center, offset in ((True, False), (False, False), (False, True)):
        for weighted in BOTH if not offset else (True,):
            x, weight = case.matrix(), new(case.cols) if weighted else None
            bias = new(case.cols) if center and weighted else None
            given = x, weight, bias, 1e-5, center, offset
            y, mean, rstd = norm._norm_now(*given, torch.bfloat16)
            for parameters in {weighted, False}:
                norm._norm_backward_now(y, x, weight, mean, rstd, center, offset, parameters)
            for observe in BOTH:
                terms = *slot(), 448.0, observe, True
                norm_quantize._norm_quantize_now(*given, case.dtype, *terms)


def losses(case: Case) -> None:
    """`cross_entropy`, `add_rows`."""
    logits, labels = case.matrix(), new(case.rows, dtype=torch.int64)
    for ignored in (-100, 0, 1, 16, -(2**31), 2**31, 2**40, -(2**40)):
        _, lse, _ = cross_entropy.cross_entropy(logits, labels, ignored)
        for by_loss in (new(case.rows), new()):
            cross_entropy.cross_entropy_backward(logits, labels, lse, by_loss, ignored)
    for matrices in (1, 2):
        add_rows(new(matrices, min(case.rows, 1000), case.cols))


def banks(case: Case) -> None:
    """`delayed_update`."""
    for algo, mixed in itertools.product(("max", "most_recent"), BOTH):
        length = min(case.cols, 1024)
        whole = new(case.rows, 4), new(case.rows, 4)
        cursor, lengths = (new(case.rows, dtype=torch.int64) for _ in range(2))
        columns = whole[0][:, 0], whole[1][:, 0], new(case.rows)
        fused.delayed_update(
            new(case.rows, length), cursor, *columns, algo, lengths if mixed else None
        )


def weights(case: Case) -> None:
    """`ManyCasts`: into the same memory, and into new memory."""
    rows, cols = -(-case.rows // 16) * 16, -(-case.cols // 16) * 16
    for live, observe in itertools.product(BOTH, BOTH):
        outputs = [new(rows, cols), new(cols, rows)]
        outputs = [each.to(numerics.E4M3) for each in outputs] + [new()]
        job = (new(rows, cols, dtype=case.dtype), *outputs, *slot())
        many: Any = fused.many_casts([job, job])
        many.run(448.0, live=live, observe=observe)
        many.run_into([tuple(outputs)] * 2, 448.0, live=live, observe=observe)


GROUPS: dict[str, Callable[[Case], None]] = {
    group.__name__: group
    for group in (casts, formed, stored, parts, gradients, norms, losses, banks, weights)
}


def shapes() -> Iterator[Case]:
    """Matrices whose sizes and addresses Triton specialises differently."""
    for dtype in DTYPES:
        yield Case(dtype=dtype)
        for rows, cols in itertools.product((1, 1000), (1, 1003, 1024)):
            yield Case(rows, cols, 0, dtype)
        yield Case(1000, 1024, 1, dtype)
    yield Case(1000, 8192)


# Sizes of 64 bits.
LONG = (Case(2**31 + 16, 64), Case(16, 2**31 + 1))
