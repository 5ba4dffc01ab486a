"""`autocast`: where FP8 is on, what nests, what a backend means with and without FP8 hardware."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8patch
from fp8patch import amp, hardware, messages, regions, roots
from fp8patch.modules.linear import Float8Linear
from fp8patch.slots import INPUT

NO_GPU = hardware.classify("cpu", "CPU", problem="no GPU is visible to PyTorch")
L4 = hardware.classify("cuda", "NVIDIA L4", (8, 9))
H200 = hardware.classify("cuda", "NVIDIA H200", (9, 0))

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(messages, "_seen", set())
    yield
    assert regions.active() is None
    assert not roots.inside_root()


def on(monkeypatch: pytest.MonkeyPatch, machine: hardware.Hardware) -> None:
    """Makes `autocast` believe that it runs on `machine`."""
    monkeypatch.setattr(amp, "detect", lambda device=None: machine)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 48)
        self.tail = nn.Linear(48, 16)
        self.fp8_tail = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        with fp8patch.autocast(self.fp8_tail, backend="emulate"):
            return self.tail(x)  # type: ignore[no-any-return]


def tower(fp8_tail: bool = True) -> Any:
    torch.manual_seed(0)
    model = fp8patch.convert_model(Tower(), include=("*",))
    model.fp8_tail = fp8_tail
    return model


def layer() -> Any:
    torch.manual_seed(0)
    return Float8Linear(32, 16)


def in_fp8(module: Any, x: Tensor = X) -> bool:
    """Does `module` run in FP8 here?"""
    with torch.no_grad():
        return not torch.equal(module(x), module._fp8_base.forward(module, x))


# -- regions ------------------------------------------------------------------------------------


def test_on_inside_and_off_outside() -> None:
    module = layer()
    assert not in_fp8(module)
    with fp8patch.autocast(backend="emulate"):
        assert in_fp8(module)
    assert not in_fp8(module)
    with fp8patch.autocast(False, backend="emulate"):
        assert not in_fp8(module)


def test_nesting_in_every_order() -> None:
    module = layer()
    with fp8patch.autocast(backend="emulate"):
        with fp8patch.autocast(enabled=False):
            assert not in_fp8(module)
            with fp8patch.autocast(backend="emulate"):
                assert in_fp8(module)
            assert not in_fp8(module)
        assert in_fp8(module)
        with fp8patch.autocast(backend="off"):
            assert not in_fp8(module)
        assert in_fp8(module)


def test_one_object_can_be_entered_again_and_inside_itself() -> None:
    module, region = layer(), fp8patch.autocast(backend="emulate")
    for _ in range(2):
        with region:
            assert in_fp8(module)
            with region:
                assert in_fp8(module)
            assert in_fp8(module)
        assert not in_fp8(module)


def test_an_exception_closes_the_region() -> None:
    module = layer()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), fp8patch.autocast(backend="emulate"):
            raise error
        assert not in_fp8(module)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_a_model_closes_everything(error: type[BaseException]) -> None:
    model = tower()

    def fail(*args: Any) -> None:
        raise error

    handle = model.tail.register_forward_hook(fail)
    with pytest.raises(error), fp8patch.autocast(backend="emulate"):
        model(X)
    assert regions.active() is None
    assert not roots.inside_root()
    handle.remove()
    with fp8patch.autocast(backend="emulate"):
        model(X).sum().backward()


def test_a_decorator() -> None:
    module = layer()

    @fp8patch.autocast(backend="emulate")
    def inside(depth: int) -> bool:
        """Words."""
        return in_fp8(module) if depth == 0 else inside(depth - 1)

    assert inside(0)
    assert inside(3)
    assert not in_fp8(module)
    assert (inside.__name__, inside.__doc__) == ("inside", "Words.")

    @fp8patch.autocast(enabled=False)
    def outside() -> bool:
        return in_fp8(module)

    with fp8patch.autocast(backend="emulate"):
        assert not outside()
        assert in_fp8(module)


def test_a_decorated_forward_trains() -> None:
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward = fp8patch.autocast(backend="emulate")(model.__call__)
    for _ in range(3):
        forward(X).sum().backward()
        optimizer.step()
    forward(X)
    assert len(model._fp8_bank.read("body", INPUT).history) == 3


@pytest.mark.parametrize("fp8_tail", [True, False])
def test_a_part_of_a_model_is_kept_out(fp8_tail: bool) -> None:
    model = tower(fp8_tail)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        with fp8patch.autocast(backend="emulate"):
            loss = model(X).sum()
        loss.backward()
        optimizer.step()
    bank = model._fp8_bank
    assert bool(bank.read("body", INPUT).counts.any())
    assert bool(bank.read("tail", INPUT).counts.any()) == fp8_tail


def test_a_region_opened_inside_the_model_belongs_to_the_running_forward() -> None:
    """A region in a model that no root saw begin: the module itself decides, and it trains."""
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(X).sum().backward()  # only the tail's own region
        optimizer.step()
    assert not model._fp8_bank.read("body", INPUT).counts.any()
    assert len(model._fp8_bank.read("tail", INPUT).history) == 2


def test_backward_may_run_inside_the_region_too() -> None:
    outside, inside = tower(), tower()
    with fp8patch.autocast(backend="emulate"):
        loss = outside(X).sum()
    loss.backward()
    with fp8patch.autocast(backend="emulate"):
        inside(X).sum().backward()
        assert regions.active() is not None
        assert not regions.active().reopened  # type: ignore[union-attr]
    for a, b in zip(outside.parameters(), inside.parameters(), strict=True):
        assert a.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_a_backward_that_raises_leaves_no_region_behind() -> None:
    model = tower()

    def fail(grad: Tensor) -> None:
        raise ValueError("from a hook")

    with fp8patch.autocast(backend="emulate"):
        y = model(X)
    model.body.weight.register_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        y.sum().backward()
    with fp8patch.autocast(enabled=False):
        assert not in_fp8(model.tail, torch.randn(2, 48))
    with fp8patch.autocast(backend="emulate"):
        assert regions.active() is not None
        assert not regions.active().reopened  # type: ignore[union-attr]


def test_torch_autocast_is_left_alone() -> None:
    with fp8patch.autocast(backend="emulate"):
        assert not torch.is_autocast_enabled("cpu")
        assert layer()(X).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert layer()(X).dtype == torch.bfloat16


# -- the hardware rule --------------------------------------------------------------------------


def test_auto_without_fp8_is_off_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, NO_GPU)
    module = layer()
    for _ in range(3):
        with fp8patch.autocast():
            assert not in_fp8(module)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("fp8patch: FP8 is off: ")
    assert "no GPU is visible" in said
    assert 'autocast(backend="emulate")' in said


def test_fp8_without_fp8_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, NO_GPU)
    with pytest.raises(fp8patch.HardwareError, match="no GPU is visible"):
        fp8patch.autocast(backend="fp8")
    fp8patch.autocast(False, backend="fp8")  # off is off


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(fp8patch.HardwareError, match="emulate"):
        fp8patch.autocast(backend="emulated")  # type: ignore[arg-type]


@pytest.mark.parametrize("enabled", [True, False])
def test_off_and_disabled_are_quiet(
    enabled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, NO_GPU)
    with fp8patch.autocast(enabled, backend="off"), fp8patch.autocast(False):
        assert not in_fp8(layer())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("machine", [NO_GPU, H200], ids=["no_gpu", "h200"])
def test_bf16_is_bf16_autocast_and_no_fp8(
    machine: hardware.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, machine)
    module = layer()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module(X)
    with torch.no_grad(), fp8patch.autocast(backend="bf16"):
        assert torch.is_autocast_enabled("cpu")
        y = module(X)
    assert not torch.is_autocast_enabled("cpu")
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


def test_bf16_leaves_an_autocast_of_the_script_alone() -> None:
    with torch.autocast("cpu", torch.float16), fp8patch.autocast(backend="bf16"):
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert layer()(X).dtype == torch.float16
    with fp8patch.autocast(backend="emulate"), fp8patch.autocast(backend="bf16"):
        assert not in_fp8(layer())


@pytest.mark.parametrize("machine", [L4, H200], ids=["l4", "h200"])
def test_with_fp8_hardware_a_module_on_the_cpu_is_stock_or_an_error(
    machine: hardware.Hardware,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on(monkeypatch, machine)
    module = layer()
    for _ in range(2):
        with fp8patch.autocast():
            assert regions.active().execution == "fp8"  # type: ignore[union-attr]
            assert not in_fp8(module)
    assert capsys.readouterr().err.count("\n") == 1
    with (
        pytest.raises(fp8patch.HardwareError, match="on cpu"),
        fp8patch.autocast(backend="fp8"),
    ):
        module(X)
    with fp8patch.autocast(backend="emulate"):
        assert in_fp8(module)


def test_rowwise_where_only_tensors_can_be_scaled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, L4)
    module = Float8Linear(32, 16, recipe="rowwise")
    with fp8patch.autocast():
        assert not in_fp8(module)
    assert "one scale a row" in capsys.readouterr().err
    with (
        pytest.raises(fp8patch.HardwareError, match="rowwise"),
        fp8patch.autocast(backend="fp8"),
    ):
        module(X)
    with fp8patch.autocast(backend="emulate"):
        assert in_fp8(module)


def test_a_recipe_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(fp8patch.RecipeError, match="delayed"):
        fp8patch.autocast(recipe="delayd")


@pytest.mark.gpu
def test_backends_on_a_gpu() -> None:
    torch.manual_seed(0)
    module: Any = Float8Linear(32, 16).cuda()
    x = X.cuda()
    results = {}
    for backend in ("auto", "fp8", "emulate", "off"):
        with torch.no_grad(), fp8patch.autocast(backend=backend):  # type: ignore[arg-type]
            results[backend] = module(x)
    assert torch.equal(results["auto"], results["fp8"])
    assert torch.equal(results["off"], module(x))
    assert not torch.equal(results["fp8"], results["off"])
    assert (results["fp8"] - results["emulate"]).abs().max() < 0.01


@pytest.mark.parametrize(
    ("change", "field"),
    [({"margin": 1}, "margin"), ({"scaling": "current"}, "scaling"), ({"fp8_format": "e4m3"}, "f")],
)
def test_a_region_changes_gemm_precisions_only(change: dict[str, Any], field: str) -> None:
    model = fp8patch.convert_model(nn.Sequential(nn.Linear(16, 16)), include=["*"])
    x = torch.randn(4, 16)
    with fp8patch.autocast(backend="emulate", recipe=fp8patch.Recipe(wgrad="bf16")):
        model(x)
    other = fp8patch.Recipe(**change)
    with fp8patch.autocast(backend="emulate", recipe=other):
        with pytest.raises(fp8patch.RecipeError, match=f"says {field}.*converted with"):
            model(x)


def test_another_thread_is_stock_and_cannot_open_a_region() -> None:
    """The region is one a process: backward has to find it from threads of its own."""
    model = fp8patch.convert_model(nn.Sequential(nn.Linear(16, 16)), include=["*"])
    x = torch.randn(4, 16)
    with torch.no_grad():
        stock = model(x)
    found: dict[str, Any] = {}

    def beside() -> None:
        with torch.no_grad():
            found["output"] = model(x)
        try:
            with fp8patch.autocast(backend="emulate"):
                pass
        except fp8patch.Fp8PatchError as error:
            found["error"] = str(error)

    with fp8patch.autocast(backend="emulate"):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        with torch.no_grad():
            assert not torch.equal(model(x), stock)
    assert torch.equal(found["output"], stock)
    assert "another thread" in found["error"]
    assert regions.active() is None


def test_training_a_converted_model_outside_any_block_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    messages._seen.clear()
    model = fp8patch.convert_model(nn.Sequential(nn.Linear(16, 16)), include=["*"])
    x = torch.randn(4, 16)
    with fp8patch.autocast(enabled=False):
        model(x)
    assert capsys.readouterr().err == ""
    model(x)
    model(x)
    said = capsys.readouterr().err
    assert said.count("outside fp8patch.autocast()") == 1


def test_a_backend_given_as_enabled_is_refused() -> None:
    with pytest.raises(TypeError, match="backend='emulate'"):
        fp8patch.autocast("emulate")  # type: ignore[arg-type]


def test_a_generator_function_is_not_decorated() -> None:
    with pytest.raises(TypeError, match="generator"):

        @fp8patch.autocast(backend="emulate")
        def batches() -> Any:
            yield 1


def test_a_nested_auto_is_what_the_outer_block_is() -> None:
    with fp8patch.autocast(backend="emulate"):
        with fp8patch.autocast(recipe=fp8patch.Recipe(wgrad="bf16")):
            region = regions.active()
            assert region is not None
            assert (region.execution, region.recipe.wgrad) == ("emulate", "bf16")  # type: ignore[union-attr]
