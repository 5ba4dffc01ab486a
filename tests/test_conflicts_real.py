"""What rules a model's precision already, made by the libraries themselves: refused, whole.

Stand-ins for libraries that need a GPU or a compiler are in test_inject_models.py.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from injected import armed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from trap_models import noise

from fp8patch.errors import ConversionError


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def torchao_float8() -> nn.Module:
    float8 = pytest.importorskip("torchao.float8")
    converted: nn.Module = float8.convert_to_float8_training(mlp())
    assert type(converted[0]).__module__.startswith("torchao.float8")
    return converted


def torchao_int8() -> nn.Module:
    """A quantised base that is frozen, and a head that trains."""
    quantization = pytest.importorskip("torchao.quantization")
    base = mlp()
    quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
    return nn.Sequential(base, nn.Linear(32, 32))


def accelerate_fp8() -> nn.Module:
    pytest.importorskip("torchao.float8")
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs

    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()], cpu=True)
    model = mlp()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return prepared


def fsdp1(use_orig_params: bool) -> nn.Module:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(mlp(), use_orig_params=use_orig_params, device_id=cpu)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def is_refused(model: nn.Module, match: str) -> None:
    classes = [type(module) for module in model.modules()]
    for _ in range(2):
        with pytest.raises(ConversionError, match=match):
            model(noise(4, 32))
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (torchao_float8, r"0 was converted by torchao \(Float8Linear\)"),
        (torchao_int8, r"0\.0 and 1 more: Linear holds quantised weights .*--skip"),
        (accelerate_fp8, r"Accelerator\(mixed_precision='fp8'\): .* Use 'bf16'"),
        (lambda: nn.DataParallel(mlp()), "nn.DataParallel"),
    ],
    ids=["torchao_float8", "torchao_int8", "accelerate_fp8", "data_parallel"],
)
def test_refused_whole(make: Any, match: str) -> None:
    with armed(backend="emulate"):
        is_refused(make(), match)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.usefixtures("group")
def test_fsdp_needs_its_original_parameters() -> None:
    with armed(backend="emulate"):
        is_refused(fsdp1(use_orig_params=False), "use_orig_params=True, or use fully_shard")
    with armed(backend="emulate") as run:
        fsdp1(use_orig_params=True)(noise(4, 32)).sum().backward()
        assert len(run.models) == 1
    with armed(backend="emulate") as run:
        model = mlp()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(noise(4, 32)).sum().backward()
        assert run.record.coverage.totals()["fp8_calls"] == 2


def test_quantised_parts_can_be_left_out() -> None:
    model = torchao_int8()
    with armed(backend="emulate", skip=["0.*"], include=["1"]) as run:
        model(noise(4, 32)).sum().backward()
        assert [d.path for d in run.models[0].plan.converted()] == ["1"]
