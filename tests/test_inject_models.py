"""Which modules are taken for models, and what their calls run in."""

import copy
from typing import Any

import pytest
import torch
from injected import Wrapped, armed
from torch import Tensor, nn
from trap_models import bert, blocks, llama, noise, tokens

from fp8patch.modules.gemms import Float8Gemms


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each FP8 GEMM forward."""
    seen: list[int] = []
    original = Float8Gemms.forward

    def counted(ctx: Any, *args: Any) -> Any:
        seen.append(1)
        return original(ctx, *args)

    monkeypatch.setattr(Float8Gemms, "forward", staticmethod(counted))
    return seen


def is_converted(model: nn.Module) -> bool:
    return any(hasattr(type(m), "_fp8_base") for m in model.modules())


def train(model: Any, x: Tensor, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    output = model(x)
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- which modules --------------------------------------------------------------------------------


def test_two_models_that_train_are_both_converted(capsys: pytest.CaptureFixture[str]) -> None:
    generator, critic = blocks(), blocks(depth=3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (generator, critic)]
    with armed(backend="emulate") as run:
        for _ in range(3):
            train(critic, generator(noise(4, 32)).detach(), optimizers[1])
            critic(generator(noise(4, 32))).mean().backward()
            optimizers[0].step()
        assert run.record.steps == 3
        assert [len(m.plan.converted()) for m in run.models] == [6, 9]
    assert is_converted(generator)
    assert is_converted(critic)


def test_a_model_that_comes_later_takes_no_step_back() -> None:
    critic, generator = blocks(), blocks()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (critic, generator)]
    with armed(backend="emulate") as run:
        for _ in range(3):
            train(critic, noise(4, 32), optimizers[0])
        for _ in range(2):
            train(generator, noise(4, 32), optimizers[1])
            train(critic, noise(4, 32), optimizers[0])
        assert run.record.steps == 5  # those of the one that stepped most


def test_in_bf16_an_inner_model_is_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A task trains, and the model in it is evaluated by itself, as timm does."""
    task, x = Wrapped(blocks()), noise(4, 32)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.01)
    evaluations = []
    with armed(backend="bf16") as run:
        for _ in range(2):
            for _ in range(3):
                task(x).backward()
                optimizer.step()
            with torch.no_grad():
                evaluations.append(task.model(x))
        assert run.record.steps == 6
        assert len(run.models) == 1
    assert capsys.readouterr().err.count("BF16 autocast") == 1
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(evaluations[1], task.model(x).float())


def test_teachers_and_metrics_are_left_alone(gemms: list[int]) -> None:
    model, teacher, metric = blocks(), blocks().requires_grad_(False), blocks()
    with armed(backend="emulate"):
        for _ in range(3):
            teacher(noise(4, 32))
            train(model, noise(4, 32))
            with torch.no_grad():
                stock = metric(noise(4, 32))
    assert stock.dtype == torch.float32
    assert torch.equal(stock, metric(noise(4, 32)))
    assert is_converted(model)
    assert not is_converted(teacher)
    assert not is_converted(metric)


@pytest.mark.parametrize("pattern", ["Blo*", "my_teach*"])
def test_roots_names_a_frozen_one_by_class_or_variable(pattern: str) -> None:
    my_teacher = blocks().requires_grad_(False)
    with armed(backend="emulate", roots=[pattern]):
        my_teacher(noise(4, 32))
    assert is_converted(my_teacher)


def test_roots_that_match_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with armed(backend="emulate", roots=["Nothing"]) as run:
        train(blocks(), noise(4, 32))
        run.finish()
    assert "--roots: no model is called Nothing" in capsys.readouterr().err


def test_a_call_without_gradients_comes_first() -> None:
    with_optimizer, without = blocks(), blocks()
    optimizer = torch.optim.SGD(with_optimizer.parameters(), lr=0.1)
    with armed(backend="emulate"):
        made_later = torch.optim.SGD(blocks().parameters(), lr=0.1)
        assert made_later.param_groups
        known = torch.optim.SGD(with_optimizer.parameters(), lr=0.1)
        for _ in range(5):
            with torch.no_grad():
                with_optimizer(noise(4, 32))
                without(noise(4, 32))
        assert is_converted(with_optimizer)
        assert not is_converted(without)
        train(without, noise(4, 32))
        assert is_converted(without)
    del optimizer, known


def test_a_single_linear_and_a_loss_are_no_models() -> None:
    linear, loss = nn.Linear(32, 32), nn.MSELoss()
    with armed(backend="emulate") as run:
        loss(linear(noise(4, 32)), noise(4, 32)).backward()
        assert not run.models
    assert type(linear) is nn.Linear


def test_inner_module_copy_and_wrapper_run_in_fp8_too(gemms: list[int]) -> None:
    model = blocks()
    task = Wrapped(model)
    with armed(backend="emulate"):
        optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
        for _ in range(2):
            task(noise(4, 32)).backward()
            optimizer.step()
        average = copy.deepcopy(model)
        del gemms[:]
        with torch.no_grad():
            assert model(noise(4, 32)).dtype == torch.float32
        assert len(gemms) == 4
        with torch.no_grad():
            before = average(noise(4, 32))
            for p in model.parameters():
                p.mul_(3)
            after = average(noise(4, 32))
            for p in average.parameters():
                p.zero_()
            zeroed = average(noise(4, 32))
        assert len(gemms) == 16
        assert torch.equal(before, after), "the copy computes with the original's weights"
        assert torch.equal(zeroed, noise(4, 32))
        Wrapped(Wrapped(model)).model(noise(4, 32))
        assert len(gemms) == 20


def test_a_part_that_was_called_first(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(blocks(), blocks())
    with armed(backend="emulate"):
        model[0](noise(4, 32))
        model(noise(4, 32))
        copy.deepcopy(model[0])(noise(4, 32))
    said = capsys.readouterr().err
    assert said.count("warning: 4 Linears of Sequential are not in FP8 (1.layers.0.up") == 1
    assert said.count("warning") == 1


def test_generate_runs_in_fp8(gemms: list[int]) -> None:
    model = llama()
    with armed(backend="emulate"):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        del gemms[:]
        model.generate(tokens(1, 4), max_new_tokens=2, do_sample=False)
    assert len(gemms) == 28


# Dynamo instantiates autograd functions, which warns.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_root(gemms: list[int]) -> None:
    model = torch.compile(blocks(), backend="aot_eager")
    with armed(backend="emulate") as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            train(model, noise(4, 32), optimizer)
        assert run.record.steps == 3
        assert run.record.coverage.totals()["fp8_calls"] == 4
        assert run.models[0].name == "Blocks"
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs >= 1
    torch._dynamo.reset()


# peft asks transformers by a name that is going to change.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft(gemms: list[int]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(llama(), config)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    with armed(backend="emulate") as run:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        for _ in range(3):
            model(input_ids=tokens(), labels=tokens()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.record.steps == 3
        assert run.record.coverage.totals()["fp8_calls"] == 14
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


def test_a_head_that_is_replaced_mid_run(gemms: list[int]) -> None:
    model = bert()
    with armed(backend="emulate"):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        model.cls.predictions.transform.dense = nn.Linear(32, 32)
        del gemms[:]
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert len(gemms) == 12


# -- what a call runs in --------------------------------------------------------------------------


def test_a_model_in_bf16_is_not_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    model = blocks().bfloat16()
    model.layers[0].up.register_forward_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
    )
    with armed(backend="emulate"):
        output = model(noise(4, 32).bfloat16())
    assert output.dtype == torch.bfloat16
    assert seen == [False]


def test_fp16_autocast_of_the_script_is_left_alone(gemms: list[int]) -> None:
    model, scaler = blocks(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = [p.clone() for p in model.parameters()]
    with armed(backend="emulate"):
        with torch.autocast("cpu", torch.float16):
            hidden = model.layers[0].up.weight.dtype, model(noise(4, 32))
            loss = hidden[1].square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert gemms
    assert all(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
