"""Misaligned output heads: which ones, that nothing else of them changes, and their arithmetic."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8patch
from fp8patch.modules import aligned
from fp8patch.modules.aligned import AlignedGemms, AlignedLinear
from fp8patch.numerics import sqnr
from fp8patch.ops import cross_entropy as ops


class Model(nn.Module):
    """A head over `vocabulary` words, tied to the embedding or not."""

    def __init__(self, vocabulary: int = 1027, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.up = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, vocabulary, bias=not tied)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lm_head(torch.relu(self.up(self.embed(ids))))
        return output


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_a_misaligned_head_changes_class_and_nothing_else(tied: bool) -> None:
    torch.manual_seed(0)
    model = Model(tied=tied)
    before = dict(model.named_parameters())
    stock = copy.deepcopy(model)
    plan = fp8patch.plan_model(model, include=("up",))
    head = next(d for d in plan.decisions if d.path == "lm_head")
    assert (head.action, head.aligned_to) == ("skip", 1032)
    assert head.reason.endswith("its BF16 GEMM runs on a copy padded to 1032 rows")
    fp8patch.convert_model(model, plan)
    assert type(model.lm_head) is AlignedLinear
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    ids = torch.randint(0, 1027, (2, 8))
    assert torch.equal(model(ids), stock(ids))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.lm_head) is AlignedLinear
    fp8patch.revert_model(model)
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("vocabulary", [1024, 1032, 51], ids=["aligned", "by eight", "small"])
def test_other_heads_stay_as_they_are(vocabulary: int) -> None:
    model = fp8patch.convert_model(Model(vocabulary), include=("up",))
    assert type(model.lm_head) is nn.Linear


def test_a_head_that_may_run_in_fp8_but_does_not_fit() -> None:
    """Asked for, and skipped for its shape: its GEMM is as slow as any other head's."""
    model = Model()
    plan = fp8patch.plan_model(model, include=("*",))
    head = next(d for d in plan.decisions if d.path == "lm_head")
    assert (head.code, head.aligned_to) == ("misaligned", 1032)
    skipped = fp8patch.plan_model(model, include=("*",), skip=("lm_head",))
    assert next(d for d in skipped.decisions if d.path == "lm_head").aligned_to is None


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model = fp8patch.convert_model(Model(), include=("up",))
    fp8patch.save(model, tmp_path / "saved")
    loaded = fp8patch.load(tmp_path / "saved", model=Model())
    assert type(loaded.lm_head) is AlignedLinear


def gemms(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Output and gradients by AlignedGemms."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    extra = None if bias is None else bias.clone().requires_grad_()
    output = AlignedGemms.apply(*leaves, extra, torch.bfloat16)  # type: ignore[no-untyped-call]
    assert output.is_contiguous()
    assert output._base is None
    output.backward(grad)
    grads = [leaf.grad for leaf in (*leaves, *([] if extra is None else [extra]))]
    assert all(g is not None for g in grads)
    return [output.detach(), *(g for g in grads if g is not None)]


def wanted(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grad: torch.Tensor
) -> list[torch.Tensor]:
    """The same in FP64, from operands in BF16."""
    rows, columns, g = (t.bfloat16().double() for t in (x, weight, grad))
    output = rows @ columns.t()
    if bias is None:
        return [output, g @ columns, g.t() @ rows]
    return [output + bias.bfloat16().double(), g @ columns, g.t() @ rows, g.sum(0)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
# (With 32 rows, the output is just too small for the padded weight to lie there.)
@pytest.mark.parametrize("rows", [40, 33, 32, 0])
@pytest.mark.parametrize("n", [1027, 1025, 1031])
def test_arithmetic(n: int, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(n)
    x, weight, b, grad = (
        torch.randn(shape, generator=generator) for shape in ((rows, 32), (n, 32), (n,), (rows, n))
    )
    b_ = b if bias else None
    grad = grad.bfloat16()
    reference = wanted(x, weight, b_, grad)
    for got, want in zip(gemms(x, weight, b_, grad), reference, strict=True):
        assert got.shape == want.shape
        assert torch.equal(want, got.double()) or sqnr(want, got.double()) > 50
    # Rows apart, with anything between them, are copied like others.
    apart = torch.full((rows, 1032), torch.nan).bfloat16()
    apart[:, :n] = grad
    for got, want in zip(gemms(x, weight, b_, apart[:, :n]), reference, strict=True):
        assert torch.equal(want, got.double()) or sqnr(want, got.double()) > 50
    # The padding must be zeros: what an empty tensor happens to hold would come into dgrad.
    real = aligned._pad_rows

    def dirty(weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        padded = real(weight, *rest)
        padded[weight.shape[0] :] = torch.nan
        return padded

    monkeypatch.setattr(aligned, "_pad_rows", dirty)
    assert gemms(x, weight, b_, grad)[1].isnan().any() or not rows


@pytest.mark.parametrize("n", [1027, 1025, 1031])
def test_a_fused_losss_gradient_is_read_where_it_lies(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(n)
    x, weight = (torch.randn(m, 32, generator=generator) for m in (40, n))
    logits = torch.randn(40, n, generator=generator).bfloat16()
    labels = torch.randint(0, n, (40,), generator=generator)
    _, lse, _ = ops.cross_entropy(logits, labels, -100)
    copies: list[torch.Tensor] = []
    real = aligned._copy
    monkeypatch.setattr(aligned, "_copy", lambda *args: copies.append(args[0]) or real(*args))

    def grads() -> torch.Tensor:
        return ops.cross_entropy_backward(logits, labels, lse, torch.ones(()), -100)

    grad = grads()
    for got, want in zip(gemms(x, weight, None, grad), wanted(x, weight, None, grad), strict=True):
        assert torch.equal(want, got.double()) or sqnr(want, got.double()) > 50
    assert len(copies) == 1  # the output
    # Not if another one came since, nor if it is a tensor of its own.
    older, _ = grads(), grads()
    gemms(x, weight, None, older)
    gemms(x, weight, None, grads().clone())
    assert len(copies) == 5


def test_only_the_memory_of_the_last_gradient() -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    logits = torch.randn(4, 27)
    _, lse, _ = ops.cross_entropy(logits, labels, -100)
    grad = ops.cross_entropy_backward(logits, labels, lse, torch.ones(()), -100)
    assert grad.stride() == (32, 1)
    whole = ops.with_zeros(grad.view(2, 2, 27).view(4, 27), 8)
    assert whole is not None
    assert whole.shape == (4, 32)
    assert not whole[:, 27:].any()
    assert ops.with_zeros(grad.t(), 8) is None
    # Two heads side by side: what lies behind the first one's is the second one's.
    for part in (grad[:, :11], grad[:, 11:], grad[2:]):
        assert ops.with_zeros(part, 8) is None
    assert ops.with_zeros(torch.randn(4, 32)[:, :27], 8) is None
    del grad, whole
    for _ in range(8):
        assert ops.with_zeros(torch.empty(4, 32)[:, :27], 8) is None


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
def test_it_is_the_stock_head_in_bf16(bias: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(64, 5003, bias=bias, device="cuda")
    ours = copy.deepcopy(stock)
    ours.__class__ = AlignedLinear
    x = torch.randn(4, 128, 64, device="cuda")
    results = []
    for head in (stock, ours):
        given = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend="fp8"):
            output = head(given)
        assert output.dtype == torch.bfloat16
        assert output.is_contiguous()
        output.float().pow(2).mean().backward()
        results.append([output.detach(), given.grad, *(p.grad for p in head.parameters())])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert sqnr(a.double(), b.double()) > 45


@pytest.mark.parametrize("n", [5, 6, 12, 16])
@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_of_rows(n: int, offset: int, dtype: torch.dtype) -> None:
    source = torch.randn(3, n + 4, dtype=dtype)[:, offset : offset + n]
    target = torch.zeros(3, n + 3, dtype=torch.bfloat16)
    aligned._copy(source, target[:, :n])
    assert torch.equal(target[:, :n], source.to(torch.bfloat16))
    assert not target[:, n:].any()
    aligned._copy(source.t(), target[:, :n].t())
    assert torch.equal(target[:, :n], source.to(torch.bfloat16))
