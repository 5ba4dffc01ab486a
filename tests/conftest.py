"""What every test gets: one thread, no network, and the rule for tests that need a GPU."""

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import hypothesis
import pytest
import torch

from fp8patch import hardware

# Two workers share two cores; child processes inherit the variable.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when huggingface_hub is imported, which no test has done yet: nothing is ever downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples on every run: a red build has to be the change's fault.
hypothesis.settings.register_profile("fp8patch", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fp8patch")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that Dynamo has compiled is there before, nor after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, on the CPU."""
    store = tmp_path_factory.mktemp("store") / "store"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@cache
def _real_hardware() -> hardware.Hardware:
    return hardware.detect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    found = _real_hardware()
    if found.fp8:
        return
    if os.environ.get("FP8PATCH_REQUIRE_GPU") == "1":
        pytest.fail(f"FP8PATCH_REQUIRE_GPU=1, but {found.reason}", pytrace=False)
    pytest.skip(found.reason)


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    """TrainingArguments sets this variable of its process, and the next test would inherit it."""
    name = "ACCELERATE_MIXED_PRECISION"
    before = os.environ.get(name)
    yield
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CUDA graphs that a CPU can replay: a `graph_machine.Machine`."""
    from graph_machine import installed

    with installed(monkeypatch) as found:
        yield found


@pytest.fixture
def no_donations() -> Iterator[None]:
    """Else PyTorch keeps no graph of a compiled block, whoever asks."""
    import torch._functorch.config

    with torch._functorch.config.patch(donated_buffer=False):
        yield
