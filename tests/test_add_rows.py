"""Sums of partial sums: the operator, and that Inductor's code calls it."""

import functools
import inspect
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.utils
from interpreted import check_interpreted
from quiet import FRESH, INDUCTOR
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch.nn import functional as F

from fp8patch.blocks import compiling, partial_sums
from fp8patch.ops.add_rows import add_rows

pytestmark = [*INDUCTOR, FRESH]

SHAPES = [(1, 1), (5, 37), (768, 1024), (2, 33, 130), (1576, 1280), (3, 1, 70), (2, 512, 8192)]


def close(partial: torch.Tensor, sums: torch.Tensor) -> bool:
    expected = partial.double().sum(-2)
    bound = 1e-6 * partial.double().abs().sum(-2)
    return bool(((sums.double() - expected).abs() <= bound).all()) and sums.shape == expected.shape


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums(device: str) -> None:
    for shape in SHAPES:
        partial = torch.randn(shape, device=device)
        assert close(partial, add_rows(partial)), shape
        assert torch.equal(add_rows(partial), add_rows(partial))
        assert not close(partial, add_rows(partial[..., :-1, :].contiguous()))
    assert add_rows(torch.empty(0, 3, device=device)).tolist() == [0.0] * 3
    assert add_rows(torch.empty(3, 0, device=device)).shape == (0,)


_INTERPRETED = """
import torch
from test_add_rows import SHAPES, close
from fp8patch.ops.triton.add_rows import add_rows

for shape in SHAPES[:5]:
    for columns in (0, 8, 64):
        partial = torch.randn(shape)
        assert close(partial, add_rows(partial, columns)), (shape, columns)
print("done")
"""


def test_under_the_interpreter() -> None:
    check_interpreted(_INTERPRETED)


WORKSPACE = "workspace_0[0 * (768) * (1024) : (0 + 1) * (768) * (1024)].view(768, 1024)"


@pytest.mark.parametrize("keep", ["", ", keepdim=False", ", keepdim=True"])
@pytest.mark.parametrize(
    "after", ["", ".view([1024])", ".to(torch.bfloat16)", ".view([1, 1024]).to(torch.bfloat16)"]
)
def test_the_line_that_is_written_anew(after: str, keep: str) -> None:
    workspace = torch.randn(2 * 768 * 1024)
    for place in (WORKSPACE, WORKSPACE.replace("768", "((s0 + 15) // 16)")):
        line = f"buf7 = {place}.sum(dim=0{keep}){after}"
        ours = partial_sums.rewritten(line)
        assert ours != line
        results = []
        for code in (line, ours):
            names: dict[str, Any] = {"workspace_0": workspace, "torch": torch, "s0": 768 * 16}
            exec(code, names)
            results.append(names["buf7"])
        assert torch.equal(*results)


@pytest.mark.parametrize("operation", ["amax(dim=0)", "sum(dim=1)", "sum(dim=0, out=x)"])
def test_other_lines_stay(operation: str) -> None:
    line = f"buf7 = {WORKSPACE}.{operation}"
    assert partial_sums.rewritten(line) == line
    for line in ("buf7 = buf6.sum(dim=0)", "buf7 = w[0 : 6].view(1, 2, 3).sum(dim=0)"):
        assert partial_sums.rewritten(line) == line


def test_inductor_still_writes_such_lines() -> None:
    """Another form of them would not be found, in silence."""
    source = inspect.getsource(SIMDScheduling._codegen_mix_order_reduction)
    (written,) = [line.strip() for line in source.splitlines() if "final_reduce = f" in line]
    names = {
        "buffer_name": "buf7", "ws_name": "workspace_0", "start": "0 * (768) * (1024)",
        "end": "(0 + 1) * (768) * (1024)", "nsplit": "768", "rnumel": "1024", "opname": "sum",
        "keepdim": "False",
    }  # fmt: skip
    exec(written, {}, names)
    assert partial_sums.rewritten(names["final_reduce"]) != names["final_reduce"]


def test_only_inside_and_only_lines() -> None:
    lines: list[Any] = []

    class Wrapper(PythonWrapperCodegen):
        def __init__(self) -> None:
            self.lines = lines

    line, other = f"buf7 = {WORKSPACE}.sum(dim=0)", object()
    with partial_sums.added_here():
        Wrapper().writeline(line)
        Wrapper().writeline(other)
    Wrapper().writeline(line)
    assert lines == [partial_sums.rewritten(line), other, line]


@pytest.mark.gpu
def test_inductors_own_code() -> None:
    """A LayerNorm's gradients: two sums, by our kernel where blocks are compiled."""
    torch.manual_seed(0)
    x = torch.randn(16384, 1024, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(1024, device="cuda", requires_grad=True) for _ in range(2))
    grad = torch.randn_like(x)
    given = x, weight, bias

    def gradients(backend: Any) -> tuple[tuple[torch.Tensor, ...], str]:
        def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (1024,), weight, bias)

        run = torch.compile(norm, backend=backend)
        with torch._inductor.config.patch(fx_graph_cache=False):
            found, codes = torch._inductor.utils.run_and_get_code(
                lambda: torch.autograd.grad(run(*given), given, grad)
            )
        return found, "".join(codes)

    expected, stock = gradients(torch._inductor.compile_fx.compile_fx)
    found, ours = gradients(functools.partial(compiling.inductor, keep_less=False))
    sums = [line for line in stock.splitlines() if ".sum(dim=0" in line]
    assert len(sums) == 2, stock[-3000:]
    assert "add_rows(" not in stock
    assert ours.count("add_rows(") == 2, sums
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
