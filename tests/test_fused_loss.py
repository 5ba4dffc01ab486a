"""The fused loss in models: the same losses and gradients, less memory, and nothing left behind."""

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from quiet import INDUCTOR
from torch import Tensor, nn
from torch.nn import functional as F

import fp8patch
from fp8patch import fused_loss
from fp8patch.deferred import Deferred
from fp8patch.numerics import sqnr
from fp8patch.ops import cross_entropy as ops

STOCK = torch.nn.functional.cross_entropy
VOCABULARY = 600


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_loss, "DEVICES", ("cpu", "cuda"))
    yield
    assert torch.nn.functional.cross_entropy is STOCK


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of the logits of each loss that was fused."""
    dtypes: list[torch.dtype] = []
    stock = ops.cross_entropy

    def noting(logits: Tensor, *args: Any) -> Any:
        dtypes.append(logits.dtype)
        assert type(logits) is Tensor
        return stock(logits, *args)

    monkeypatch.setattr(ops, "cross_entropy", noting)
    return dtypes


def transformer(name: str) -> nn.Module:
    """A model of two layers with random weights."""
    import transformers as t

    torch.manual_seed(0)
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**small, num_key_value_heads=2))
    if name == "modernbert":
        config = t.ModernBertConfig(**small, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        return t.ModernBertForMaskedLM(config)
    if name == "gpt2":
        config = t.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4)
        return t.GPT2LMHeadModel(config)
    return t.BertForMaskedLM(t.BertConfig(**small))


def loss_and_grads(model: nn.Module, recipe: str | dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """What two emulated training steps return, and the gradients of the second."""
    model = fp8patch.convert_model(
        copy.deepcopy(model), fp8patch.Recipe.from_dict({"min_gain": 0, "loss": recipe})
    ).train()
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, ::3] = -100
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            output: Any = model(input_ids=ids, labels=labels)
        output.loss.backward()
    return output, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "bert", "modernbert", "gpt2"])
def test_models_have_the_same_loss_and_gradients(name: str, seen: list[torch.dtype]) -> None:
    model = transformer(name)
    found, grads = loss_and_grads(model, "fused")
    # `.float()` has waited, twice.
    assert seen == [torch.bfloat16] * 2
    expected, wanted = loss_and_grads(model, "stock")
    assert len(seen) == 2
    assert found.loss.dtype == expected.loss.dtype == torch.float32
    assert type(found.logits) is type(found.loss) is Tensor
    assert torch.equal(found.logits, expected.logits)
    # Where the model's loss is FP32 it is the same; BERT's rounds log-probabilities to BF16.
    rounded = name == "bert"
    tolerance = 2e-3 if rounded else 1e-6
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=0)
    assert grads.keys() == wanted.keys()
    for key, grad in wanted.items():
        assert sqnr(grad, grads[key]) > (20 if rounded else 30), key


class OwnLoss(nn.Module):
    """A user's loss, which widens its logits and edits them."""

    def forward(self, logits: Tensor, labels: Tensor, **rest: Any) -> Tensor:
        assert type(logits) is Tensor
        wide = logits.float()
        wide[..., 10:300] = -50
        return F.cross_entropy(wide.view(-1, VOCABULARY), labels.view(-1))


@pytest.mark.parametrize("how", ["function", "module", "mapping"])
def test_a_models_own_loss_function_gets_the_logits(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = transformer("llama")
    own = OwnLoss()
    if how == "mapping":
        from transformers.loss import loss_utils

        monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", own.forward)
    elif how == "module":
        model._loss_function = own
    else:
        model.loss_function = own.forward
    found, expected = (loss_and_grads(model, recipe)[0].loss for recipe in ("fused", "stock"))
    torch.testing.assert_close(found, expected)
    assert found > 10


def test_transformers_says_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """Asked for the loss function of a model without a head, it warns."""
    import transformers

    monkey = logging.getLogger("transformers")
    monkey.addHandler(caplog.handler)
    transformers.logging.warning_once.cache_clear()
    try:
        loss_and_grads(transformer("llama"), "fused")
    finally:
        monkey.removeHandler(caplog.handler)
    assert "loss_type" not in caplog.text


def test_somebody_elses_cross_entropy_is_called_and_stays(
    monkeypatch: pytest.MonkeyPatch, seen: list[torch.dtype]
) -> None:
    calls: list[torch.dtype] = []

    def theirs(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert type(input) is Tensor
        calls.append(input.dtype)
        return 2 * STOCK(input, *args, **kwargs)

    expected = loss_and_grads(transformer("llama"), "stock")[0].loss
    torch.nn.functional.cross_entropy = theirs
    try:
        found = loss_and_grads(transformer("llama"), "fused")[0].loss
        assert torch.nn.functional.cross_entropy is theirs
        fused, _ = len(calls), calls.clear()
        loss_and_grads(transformer("llama"), "stock")
    finally:
        torch.nn.functional.cross_entropy = STOCK
    assert calls == [torch.float32] * fused
    assert not seen
    torch.testing.assert_close(found, 2 * expected)


def test_a_label_that_is_no_class_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="a label is no class, and not -100 either"):
        step(lambda x, y: F.cross_entropy(x, y + VOCABULARY), "fused")


def test_logits_that_are_edited_before_backward() -> None:
    def edited(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(x, y)
        x.mul_(2)
        return loss

    with pytest.raises(RuntimeError, match="`loss: stock` in the recipe"):
        step(edited, "fused", autocast=False)


def test_losses_that_are_edited_in_place() -> None:
    def masked(x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(x.float(), y, reduction="none")
        losses[2] = 0
        return losses.mul_(3)

    for a, b in zip(step(masked, "fused")[1], step(masked, "stock")[1], strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives() -> None:
    results = []
    for recipe in ("fused", "stock"):
        model = fp8patch.convert_model(
            Tail(lambda x, y: F.cross_entropy(x, y)),
            fp8patch.Recipe.from_dict({"include": ["up"], "loss": recipe}),
        )
        with fp8patch.autocast(backend="emulate"):
            loss = model(torch.ones(9, 32), torch.arange(9))
        (grad,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
        (grad.square().sum() + loss).backward()
        results.append(model.head.weight.grad)
    torch.testing.assert_close(*results)


def test_checkpointing_computes_the_same_loss_again() -> None:
    def chunk(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y)

    def checkpointed(x: Tensor, y: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(chunk, x, y, use_reentrant=False)

    found, expected = (step(checkpointed, recipe) for recipe in ("fused", "stock"))
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b)


def test_a_copy_made_in_the_forward_is_a_stock_model() -> None:
    model: Any = fp8patch.convert_model(transformer("llama"), fp8patch.Recipe(min_gain=0.0))
    made: list[Any] = []

    def copies(*_: Any) -> None:
        made.append(copy.deepcopy(model))
        made.append(pickle.loads(pickle.dumps(model.loss_function)))

    handle = model.model.register_forward_pre_hook(copies)
    ids = torch.randint(3, VOCABULARY, (2, 12))
    with fp8patch.autocast(backend="emulate"):
        model(input_ids=ids, labels=ids)
    handle.remove()
    twin, function = made[:2]
    assert function is twin.loss_function is model.loss_function
    assert function.__module__.startswith("transformers.loss.")


def test_a_model_that_is_gone_is_freed() -> None:
    model: Any = fp8patch.convert_model(transformer("llama"), fp8patch.Recipe(min_gain=0.0))
    ids = torch.randint(3, VOCABULARY, (2, 12))
    with fp8patch.autocast(backend="emulate"):
        model(input_ids=ids, labels=ids)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


class Tail(nn.Module):
    """A layer, a head, and a loss of any form."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], classes: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(32, 32)
        self.head = nn.Linear(32, classes)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.up(x)), labels)


def step(
    loss: Callable[[Tensor, Tensor], Tensor], fuse: str, autocast: bool = True
) -> tuple[Tensor, list[Tensor]]:
    recipe = fp8patch.Recipe.from_dict({"min_gain": 0, "loss": fuse, "include": ["up"]})
    model = fp8patch.convert_model(Tail(loss), recipe)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(9) * 11
    labels[4] = -100
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with fp8patch.autocast(backend="emulate"):
            result = model(x, labels)
    result.sum().backward()
    return result.detach(), [p.grad for p in model.parameters() if p.grad is not None]


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "mean": (lambda x, y: F.cross_entropy(x, y), True),
    "sum": (lambda x, y: F.cross_entropy(x, y, reduction="sum"), True),
    "none": (lambda x, y: F.cross_entropy(x, y, reduction="none"), True),
    "another ignored": (lambda x, y: F.cross_entropy(x, y.clamp(0), ignore_index=0), True),
    "module": (lambda x, y: nn.CrossEntropyLoss()(x.float(), y), True),
    "positional": (lambda x, y: F.cross_entropy(x, y, None, None, -100, None, "sum"), True),
    "smoothed": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), False),
    "weighted": (lambda x, y: F.cross_entropy(x.float(), y, torch.ones(VOCABULARY)), False),
    "probabilities": (lambda x, y: F.cross_entropy(x, x.detach().softmax(1)), False),
    "images": (lambda x, y: F.cross_entropy(x.t()[None], y[None] % 9), False),
    "old arguments": (lambda x, y: F.cross_entropy(x, y, size_average=False, reduce=True), False),
    "classes apart": (lambda x, y: F.cross_entropy(x.t().contiguous().t(), y), False),
    "no gradient": (lambda x, y: F.cross_entropy(x.detach(), y) + x.mean(), False),
    "one label": (lambda x, y: F.cross_entropy(x[0], y[0]), False),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_any_form_of_loss(name: str, autocast: bool, seen: list[torch.dtype]) -> None:
    loss, fuses = LOSSES[name]
    if name == "images":
        loss = lambda x, y: F.cross_entropy(x[None].transpose(1, 2), y[None])  # noqa: E731
    found, grads = step(loss, "fused", autocast)
    assert bool(seen) == fuses
    expected, wanted = step(loss, "stock", autocast)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2 if autocast else 1e-5, atol=1e-2)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 if autocast else 1e-5)


def test_only_in_training_forwards(seen: list[torch.dtype]) -> None:
    model = fp8patch.convert_model(Tail(F.cross_entropy), include=("up",))
    x, labels = torch.randn(9, 32), torch.arange(9)
    with torch.no_grad(), fp8patch.autocast(backend="emulate"):
        model(x, labels)
    with fp8patch.autocast(enabled=False):
        model(x, labels)
    model(x, labels)
    assert not seen
    late = Tail(lambda x, y: F.cross_entropy(x, y))
    late = fp8patch.convert_model(late, include=("up",))
    with fp8patch.autocast(backend="emulate"):
        late(x, labels)
        assert seen  # looked up when it is called
        # A stock model inside the region is none of ours.
        seen.clear()
        Tail(lambda x, y: F.cross_entropy(x, y))(x, labels)
    assert not seen


def test_nothing_is_left_behind() -> None:
    model: Any = fp8patch.convert_model(transformer("llama"), fp8patch.Recipe(min_gain=0.0))
    inside: list[bool] = []
    hook = model.lm_head.register_forward_hook(
        lambda *_: inside.append("_loss_function" in model.__dict__)
    )
    ids = torch.randint(3, VOCABULARY, (2, 12))
    with fp8patch.autocast(backend="emulate"):
        model(input_ids=ids, labels=ids)
        assert torch.nn.functional.cross_entropy is STOCK
        with pytest.raises(ValueError, match="shape|size|batch"):
            model(input_ids=ids, labels=ids[:1])
        assert torch.nn.functional.cross_entropy is STOCK
    assert inside == [True, True]
    assert "_loss_function" not in model.__dict__
    hook.remove()
    pickle.loads(pickle.dumps(model))
    with fp8patch.autocast(backend="emulate"):
        model.loss_function = lambda logits, labels, **_: logits.sum()
        model(input_ids=ids, labels=ids)
    assert "_loss_function" in model.__dict__


def test_somebody_elses_loss_stays() -> None:
    """Patched while our forward runs: it is not put back over."""

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        return STOCK(*args, **kwargs)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        torch.nn.functional.cross_entropy = theirs
        return F.cross_entropy(x, y)

    step(loss, "fused")
    assert torch.nn.functional.cross_entropy is theirs
    torch.nn.functional.cross_entropy = STOCK


def test_a_deferred_tensor_is_what_it_stands_for() -> None:
    stored = torch.randn(2, 3, 8).bfloat16()
    wide = Deferred.of(stored).float()
    same: list[Callable[[Tensor], Any]] = [
        lambda x: x + 1,
        lambda x: x[..., :-1, :].contiguous().view(-1, 8),
        lambda x: x.reshape(6, 8).argmax(-1),
        lambda x: x.view(torch.int32).shape,
        lambda x: x.view(dtype=torch.int32).shape,
        lambda x: x.log_softmax(-1),
        lambda x: (x.dtype, x.shape, x.device, x.ndim, x.requires_grad, x.size(-1), len(x)),
        lambda x: x.to(torch.float32).dtype,
        lambda x: x.to(torch.float64),
        lambda x: x.to("cpu"),
        lambda x: torch.cat([x, x]),
        lambda x: x.tolist(),
        lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(6, dtype=torch.long)),
        lambda x: x.half().dtype,
        lambda x: torch.empty_like(x).dtype,
        lambda x: x.new_zeros(2),
        lambda x: torch.stack((x, x), dim=0),
    ]
    for function in same:
        expected, found = function(stored.float()), function(wide)
        found = found.made() if isinstance(found, Deferred) else found
        assert type(found) is type(expected)
        if isinstance(found, Tensor):
            assert (found.dtype, found.device) == (expected.dtype, expected.device)
            assert found.shape == expected.shape
            assert torch.equal(found, expected) or found.numel() == 0
        else:
            assert found == expected
    assert wide.view(dtype=torch.int32).dtype == torch.int32
    for edited in (wide, stored.float()):
        edited[0] = 7
        edited.div_(2)
    assert torch.equal(wide + 0, edited)
    assert torch.equal(wide.view(-1, 8) + 0, edited.view(-1, 8))
    narrow = Deferred.of(stored)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow.made(), stored)
    assert (narrow * 2).dtype == torch.bfloat16


def test_the_gradient_passes_a_deferred_tensor() -> None:
    leaf = torch.randn(4, 8).bfloat16().requires_grad_()
    (Deferred.of(leaf * 2).float() * 3).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full_like(leaf, 6))


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_gradients_off_and_on_again(quiet: Any) -> None:
    def found(narrow: Callable[[Tensor], Tensor]) -> list[Any]:
        leaf = torch.ones(4, 8).bfloat16().requires_grad_()
        asked = narrow(leaf * 2)
        wide = asked.float()
        with quiet():
            accuracy = wide.argmax(-1)  # The first who wants its numbers.
            constant = asked.float() if quiet is torch.no_grad else wide.detach()
        ((wide * constant).sum() + accuracy.sum()).backward()
        return [leaf.grad, constant.requires_grad]

    expected = found(lambda x: x)
    assert torch.equal(expected[0], torch.full((4, 8), 4).bfloat16())
    deferred = found(Deferred.of)
    assert torch.equal(deferred[0], expected[0])
    assert deferred[1] is expected[1] is False


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_that_is_compiled(whole: bool, seen: list[torch.dtype]) -> None:
    model: Any = transformer("llama")
    stock, _ = loss_and_grads(model, "stock")
    compiled = torch.compile(model, backend="eager") if whole else model
    assert torch.isfinite(loss_and_grads(compiled, "fused")[0].loss)
    assert torch.isfinite(stock.loss)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [16000, 16003], ids=["aligned", "misaligned"])
def test_on_a_gpu_it_is_as_precise_and_takes_less_memory(
    classes: int, seen: list[torch.dtype]
) -> None:
    x = torch.randn(4096, 32, device="cuda", requires_grad=True)
    labels = torch.randint(0, classes, (4096,), device="cuda")
    peaks, losses, grads = [], [], []
    for recipe in ("stock", "fused"):
        model = Tail(lambda x, y: F.cross_entropy(x.float(), y), classes).cuda()
        fp8patch.convert_model(
            model, fp8patch.Recipe.from_dict({"include": ["up"], "loss": recipe})
        )
        model.loss = lambda x, y: nn.CrossEntropyLoss()(x, y)
        for _ in range(2):
            x.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend="fp8"):
                loss = model(x, labels)
            loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        losses.append(loss.item())
        grads.append(x.grad)
    assert seen == [torch.bfloat16] * 2
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert sqnr(*grads) > 15
    assert peaks[1] < 0.6 * peaks[0]


pytestmark = INDUCTOR
