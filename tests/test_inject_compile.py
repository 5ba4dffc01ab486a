"""`train --compile`: a script's models, compiled without an edit; and what is left to others."""

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from injected import armed
from quiet import DYNAMO
from torch._dynamo.testing import CompileCounterWithBackend

from fp8patch import messages
from fp8patch.blocks import compiled as blocks
from fp8patch.blocks.find import is_sharded
from fp8patch.errors import Fp8PatchError
from fp8patch.train_options import TrainOptions

pytestmark = [
    *DYNAMO,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
]

LAYERS = 2


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """The graphs that are made, by `aot_eager` instead of Inductor."""
    counter = CompileCounterWithBackend("aot_eager")
    compiles = functools.partial(blocks.compile_blocks, backend=counter)
    monkeypatch.setattr(blocks, "compile_blocks", compiles)
    monkeypatch.setattr(messages, "_seen", set())  # lines that are said once a process
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def train(model: Any, call: Any = None, steps: int = 3, micro: int = 1) -> list[Any]:
    """Losses, and what the model's parameters are at the end."""
    call = model if call is None else call
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    generator = torch.Generator().manual_seed(0)
    losses: list[Any] = []
    for _ in range(steps):
        for _ in range(micro):
            ids = torch.randint(0, 64, (2, 12), generator=generator)
            output = call(input_ids=ids, labels=ids)
            output.loss.backward()
            losses.append(output.loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [losses, [p.detach().clone() for p in model.parameters()]]


def same(a: list[Any], b: list[Any]) -> bool:
    return a[0] == b[0] and all(torch.equal(p, q) for p, q in zip(a[1], b[1], strict=True))


def eagerly(model: Any, **how: Any) -> list[Any]:
    with armed(backend="emulate"):
        return train(copy.deepcopy(model), **how)


def test_a_script_is_compiled_and_computes_the_same(
    graphs: CompileCounterWithBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama()
    expected = eagerly(model, micro=2)
    report = tmp_path / "report.json"
    with armed(backend="emulate", compile=True, report=str(report)) as run:
        assert same(train(model, micro=2), expected)
        assert graphs.frame_count == 1
        model.eval()
        ids = torch.arange(5).unsqueeze(0)
        model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        assert graphs.frame_count == 1
        assert model(input_ids=ids).past_key_values is None  # gradients are enabled
        with torch.no_grad():
            assert model(input_ids=ids).past_key_values is not None
        run.finish()
    said = capsys.readouterr().err
    assert "what it repeats (2 in all) is compiled when it is first called" in said
    where = "model.layers.0 to model.layers.1 (LlamaDecoderLayer)"
    assert f"blocks compiled: 2 of {where}; training ran with use_cache=False." in said
    assert json.loads(report.read_text())["models"][0]["compiled"] == {
        "blocks": 2,
        "structures": {where: 2},
        "cuda_graphs": False,
        "without_cache": True,
        "left_eager": {},
    }


def test_bf16_is_compiled_from_the_first_step_on(graphs: CompileCounterWithBackend) -> None:
    model = llama()
    with armed(backend="bf16"):
        expected = train(copy.deepcopy(model))
    with armed(backend="bf16", compile=True):
        assert same(train(model), expected)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(graphs: CompileCounterWithBackend, reentrant: bool) -> None:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    expected = eagerly(model)
    with armed(backend="emulate", compile=True) as run:
        assert same(train(model), expected)
        assert run.models[0].blocks.left == {}
    assert graphs.frame_count == 1


def test_adapters(graphs: CompileCounterWithBackend) -> None:
    """The first block's input has no gradient, as all before it is frozen: a graph of its own."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), config)
    expected = eagerly(model)
    with armed(backend="emulate", compile=True) as run:
        assert same(train(model), expected)
        assert run.models[0].blocks.left == {}
    assert graphs.frame_count == 2


@pytest.mark.parametrize("sharded", [False, True])
def test_wrapped(graphs: CompileCounterWithBackend, sharded: bool) -> None:
    """DDP around it; or FSDP in it, whose weights are whole between hooks of the blocks only."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    model = llama()
    expected = eagerly(model)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        call: Any = model
        if sharded:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        else:
            call = torch.nn.parallel.DistributedDataParallel(model)
        with armed(backend="emulate", compile=True) as run:
            seen = train(model, call=call)
            assert run.models[0].blocks.left == {}
        seen[1] = [p.full_tensor() if sharded else p for p in seen[1]]
        assert same(seen, expected)
        assert graphs.frame_count == 1
    finally:
        distributed.destroy_process_group()


def test_a_script_that_compiles_by_itself(
    graphs: CompileCounterWithBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    for whole in (True, False):
        model = llama()
        expected = eagerly(model)
        call: Any = model
        if whole:
            call = torch.compile(model, backend="eager")
        else:
            for layer in model.model.layers:
                layer.compile(backend="eager")
        with armed(backend="emulate", compile=True) as run:
            assert same(train(model, call=call), expected)
            assert run.models[0].blocks is None
        assert "the script compiles it by itself (torch.compile)" in capsys.readouterr().err
    assert graphs.frame_count == 0


def test_a_cache_that_is_asked_for(
    graphs: CompileCounterWithBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama()
    with armed(backend="emulate", compile=True):
        train(model)
        assert model(input_ids=torch.arange(4).unsqueeze(0), use_cache=True).past_key_values
    assert "its blocks run eagerly" in capsys.readouterr().err


def test_where_nothing_repeats(
    graphs: CompileCounterWithBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    with armed(backend="emulate", compile=True, include=["*"]) as run:
        model(torch.randn(4, 32)).sum().backward()
        assert run.models[0].blocks is None
    assert "nothing to compile" in capsys.readouterr().err


class Breaking(torch.nn.Module):
    """What it does depends on a value: no graph has all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) if x.detach().sum().item() < 1e9 else x


def test_blocks_that_are_left_eager_are_not_said_to_be_compiled(
    graphs: CompileCounterWithBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(Breaking(), Breaking())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with armed(backend="emulate", compile=True, include=["*"]) as run:
        for _ in range(3):
            model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.finish()
    said = capsys.readouterr().err
    assert "left eager: 0 to 1 (Breaking)" in said
    assert "blocks compiled" not in said


def test_what_chooses_every_layer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    with armed(backend="emulate", skip=["*"]):
        model(torch.randn(4, 32)).sum().backward()
    said = capsys.readouterr().err
    assert "2 pattern. `skip` or `overrides` of the recipe, or --skip, choose all of them." in said


def test_without_a_gpu_graphs_are_compiled_blocks(
    graphs: CompileCounterWithBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama()
    expected = eagerly(model)
    with armed(backend="emulate", cuda_graphs=True) as run:
        assert same(train(model), expected)
        run.finish()
    assert graphs.frame_count == 1
    said = capsys.readouterr().err
    assert "the model is on no GPU: compiled, no CUDA graphs." in said
    assert "blocks compiled, without CUDA graphs: 2 of model.layers.0" in said


def test_auto_without_fp8_compiles_nothing(
    graphs: CompileCounterWithBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    with armed(backend="auto", compile=True):
        train(llama())
    assert graphs.frame_count == 0
    assert (
        "Nothing is compiled either: --no-fp8 --compile compiles without FP8."
        in capsys.readouterr().err
    )


def test_options() -> None:
    assert TrainOptions(cuda_graphs=True).compiles
    assert not TrainOptions().compiles
    with pytest.raises(Fp8PatchError, match="no option 'compiled'"):
        armed(compiled=True).__enter__()
    assert not is_sharded(llama())
