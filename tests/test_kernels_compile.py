"""Every kernel compiles for the GPUs that it is for, as the host code launches it; without a GPU.

Triton's interpreter, under which the other tests run kernels here, takes what the compiler doesn't:
types that don't fit, a size of 1 where a tensor has to be, more memory than there is. And it has no
use for what `Launcher` believes to be compiled already.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import TESTS
from kernel_calls import GROUPS

# Which operators a process calls; each takes about as long as the others.
PARTS = (
    ("casts", "formed", "stored", "banks"),
    ("parts", "weights", "losses"),
    ("gradients", "norms"),
)
COMPILE = """
from compiled_kernels import check_compiles, covering, recorded
from kernel_calls import GROUPS, shapes

with recorded() as launches:
    for name in {part}:
        for case in shapes():
            GROUPS[name](case)
check_compiles(covering(launches))
print("done")
"""
# Older ones cast BF16 otherwise, and launch no kernel early.
VARIANTS = """
from unittest.mock import patch
from compiled_kernels import check_compiles, conflicts, never_launched, one_each, recorded
from fp8patch.ops.triton import add_rows, quantize
from kernel_calls import Case, GROUPS, LONG, shapes

with recorded() as launches:
    for name, group in GROUPS.items():
        for case in shapes():
            group(case)
        for case in LONG:
            if name != "norms":  # These hold whole rows.
                group(case)
assert not never_launched(launches), never_launched(launches)
assert not conflicts(launches), "\\n".join(conflicts(launches))

# What can't fail shows nothing.
early = add_rows._launch_early
without = [each for each in launches if each.launcher is not early]
assert never_launched(without) == ["_kernel"], never_launched(without)
with recorded() as careless, patch.object(quantize, "size_class", lambda number: 0):
    for case in shapes():
        GROUPS["casts"](case)
found = conflicts(careless)
assert found
assert all("quantize" in each or "cast_and_add" in each or "amax" in each for each in found), found
wrong = dict.fromkeys(quantize.ASSEMBLY, "{ no.such.instruction $0; }")
with recorded() as broken, patch.object(quantize, "ASSEMBLY", wrong):
    GROUPS["casts"](Case())
try:
    check_compiles(one_each(broken))
except AssertionError as error:
    assert "does not compile" in str(error), error
else:
    raise AssertionError("what is no instruction compiles")

# Older GPUs cast BF16 otherwise, and launch no kernel early; newer ones have less memory.
for arch in (89, 120):
    with recorded(arch) as launches:
        for name in ("casts", "losses"):
            GROUPS[name](Case())
    check_compiles(one_each(launches))
print("done")
"""


def check(script: str, cache: Path) -> None:
    """Run `script`, which has to print "done", in a process that compiles kernels.

    (In this one other tests may have chosen the interpreter.)
    """
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-6000:]
    assert result.stdout.splitlines()[-1:] == ["done"]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids="-".join)
def test_kernels_compile(part: tuple[str, ...], tmp_path: Path) -> None:
    check(COMPILE.format(part=part), tmp_path)


@pytest.mark.slow
def test_variants_and_other_gpus(tmp_path: Path) -> None:
    """No kernel is launched for what it was not compiled for."""
    check(VARIANTS, tmp_path)


def test_every_call_is_compiled() -> None:
    assert sorted(sum(PARTS, ())) == sorted(GROUPS)
