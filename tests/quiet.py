"""Warnings of PyTorch's own compilers, which are no concern of a test that compiles."""

import pytest

DYNAMO = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
INDUCTOR = [
    *DYNAMO,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]
# What is compiled in one test is not there in another (a fixture in conftest.py).
FRESH = pytest.mark.usefixtures("fresh_compiler")
