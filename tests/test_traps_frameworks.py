"""Traps of the frameworks around a model: accelerate's hooks, Trainer, DDP, FSDP."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trap_models import (
    WIDTH,
    assert_fresh,
    backward,
    blocks,
    converted,
    falls,
    fp8,
    llama,
    loss_of,
    moved,
    naive_swap,
    noise,
    ran_in_fp8,
    same,
    scales,
    sgd,
    snapshot,
    step,
    tokens,
)

import fp8patch

# Trainer and scripts say gradient_checkpointing, which transformers 5.24 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")

X = noise(5, WIDTH)


# -- accelerate's hooks --------------------------------------------------------------------------


class Counts(ModelHook):
    """Notes which class's forward it wraps."""

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("before", [True, False], ids=["hooked first", "converted first"])
def test_hooks_on_the_instance_reach_fp8(before: bool) -> None:
    model = blocks()
    if not before:
        fp8patch.convert_model(model)
    hooks = {name: Counts() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, hook in hooks.items():
        add_hook_to_module(model.get_submodule(name), hook)
    if before:
        fp8patch.convert_model(model)
    assert len(converted(model)) == 4
    optimizer, start = sgd(model), snapshot(model)
    for _ in range(2):
        step(model, X, optimizer)
    assert {hook.calls for hook in hooks.values()} == {2}
    assert set(scales(model)) == set(hooks)
    assert ran_in_fp8(model, X)
    assert moved(start, model) == set(start)
    remove_hook_from_module(model, recurse=True)
    assert ran_in_fp8(model, X)
    fp8patch.revert_model(model)
    assert not ran_in_fp8(model, X)


def test_hooks_that_were_removed_before_conversion() -> None:
    # They leave the class's own forward on the instance.
    model = blocks()
    add_hook_to_module(model.layers[0].up, Counts())
    remove_hook_from_module(model.layers[0].up)
    assert "forward" in vars(model.layers[0].up)
    fp8patch.convert_model(model)
    assert len(converted(model)) == 4
    step(model, X, sgd(model))
    assert len(scales(model)) == 4


def test_a_hooked_model_that_is_reverted_is_stock() -> None:
    model = blocks()
    add_hook_to_module(model.layers[0].up, Counts())
    fp8patch.convert_model(model)
    fp8patch.revert_model(model)
    assert model.layers[0].up._old_forward.__func__ is nn.Linear.forward
    assert not ran_in_fp8(model, X)


def test_the_naive_swap_loses_the_hooks() -> None:
    model = blocks()
    hook = Counts()
    add_hook_to_module(model.layers[0].up, hook)
    naive_swap(model)(X)
    with falls():
        assert hook.calls == 1


def test_an_align_hook_on_the_cpu() -> None:
    model = blocks()
    for layer in model.layers:
        add_hook_to_module(layer.up, AlignDevicesHook(execution_device="cpu"))
    fp8patch.convert_model(model)
    before = snapshot(model)
    step(model, X, sgd(model))
    assert moved(before, model) == set(before)
    assert ran_in_fp8(model, X)


def test_dispatched_over_a_device_map() -> None:
    model = dispatch_model(llama().eval(), {"": "cpu"}, force_hooks=True)
    stock = model(tokens()).logits
    fp8patch.convert_model(model)
    assert torch.equal(model(tokens()).logits, stock)
    assert ran_in_fp8(model, tokens())


def test_weights_that_live_elsewhere_between_calls() -> None:
    # Offloaded: a weight is on meta but for the duration of its module's forward.
    model = blocks()
    fp8patch.convert_model(model)
    for _ in range(2):
        step(model, X, sgd(model))
    twin = copy.deepcopy(model)
    cpu_offload(model, execution_device="cpu", offload_buffers=True)
    assert model.layers[0].up.weight.device.type == "meta"
    for _ in range(2):
        with torch.no_grad(), fp8():
            assert torch.equal(model(X), twin(X))
    assert scales(model) == scales(twin)


def test_offloaded_before_conversion_is_skipped_with_a_reason() -> None:
    model = cpu_offload(blocks(), execution_device="cpu")
    codes = {d.code for d in fp8patch.plan_model(model).decisions if d.kind == "linear"}
    assert codes == {"meta_weight"}


def test_a_replaced_forward_is_left_alone() -> None:
    model = blocks()
    layer = model.layers[0].up
    layer.forward = lambda x: nn.functional.linear(x, 2 * layer.weight, layer.bias)
    codes = {d.path: d.code for d in fp8patch.plan_model(model).decisions}
    assert codes["layers.0.up"] == "instance_forward"
    fp8patch.convert_model(model)
    assert type(layer) is nn.Linear


# -- Trainer -------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = tokens(1, 9, seed=index)[0]
        return {"input_ids": row, "labels": row}


def trainer(model: Any, directory: Path, **kwargs: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(directory),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        weight_decay=0.1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **kwargs,
    )
    return transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_trainer(
    tmp_path: Path, accumulate: int, recompute: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fp8patch.convert_model(llama())
    stock = llama()
    before, order = snapshot(model), [id(p) for p in model.parameters()]
    runner = trainer(
        model,
        tmp_path,
        bf16=True,
        gradient_accumulation_steps=accumulate,
        gradient_checkpointing=recompute,
        eval_strategy="steps",
        eval_steps=1,
    )
    plain = trainer(stock, tmp_path)
    assert runner.get_decay_parameter_names(model) == plain.get_decay_parameter_names(stock)
    with fp8():
        result = runner.train()
    assert result.global_step == 3
    assert moved(before, model) == set(before)
    assert [id(p) for p in model.parameters()] == order
    assert len(scales(model)) == 14
    assert all(scale > 0 for row in scales(model).values() for scale in row)
    # The last step has yet to roll. Until an optimizer is known, a backward counts as a step.
    rolls = 2 if accumulate == 1 else 3
    assert {len(model._fp8_bank.read(path, 1).history) for path in scales(model)} == {rolls}
    assert "never ran" not in capsys.readouterr().err


# -- distributed wrappers ------------------------------------------------------------------------


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("before", [True, False], ids=["wrapped first", "converted first"])
def test_ddp(before: bool) -> None:
    alone = fp8patch.convert_model(blocks())
    model = blocks()
    optimizer = sgd(model)
    if before:
        wrapped = fp8patch.convert_model(DistributedDataParallel(model))
    else:
        wrapped = DistributedDataParallel(fp8patch.convert_model(model))
    other = sgd(alone)
    for seed in range(3):
        x = noise(5, WIDTH, seed=seed)
        assert step(wrapped, x, optimizer) == step(alone, x, other)
    assert same(snapshot(model), snapshot(alone))
    assert list(scales(wrapped).values()) == list(scales(alone).values())
    # The inner model alone: what an evaluation calls.
    assert_fresh(model, X)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("before", [True, False], ids=["sharded first", "converted first"])
def test_fsdp(before: bool) -> None:
    alone = fp8patch.convert_model(blocks())
    model = blocks()
    if not before:
        fp8patch.convert_model(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer.up, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if before:
        assert type(model.layers[0].up).__name__ == "FSDPLinear"
        fp8patch.convert_model(model)
    assert len(converted(model)) == 4
    optimizer, other = sgd(model), sgd(alone)
    for seed in range(3):
        x = noise(5, WIDTH, seed=seed)
        assert step(model, x, optimizer) == step(alone, x, other)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), alone.get_parameter(name)), name
    assert ran_in_fp8(model, X)
    with torch.no_grad(), fp8():
        assert torch.equal(model(X), alone(X))
    assert list(scales(model).values()) == list(scales(alone).values())


@pytest.mark.usefixtures("group")
def test_fsdp_with_gradient_accumulation() -> None:
    model = fp8patch.convert_model(blocks())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    backward(model, X)
    fixed = scales(model)
    with fp8():
        loss = loss_of(model, 3 * X)
    loss.backward()
    assert scales(model) == fixed
    optimizer.step()
    backward(model, X)
    assert scales(model) != fixed
