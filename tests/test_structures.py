"""Tensors in what a model returns: found, and replaced without writing to the model's own."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8patch.structures import map_tensors, tensors_in

Named = namedtuple("Named", "first second")  # noqa: PYI024


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any = None


@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    first: Any
    second: Any = None


A, B = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    "value",
    [
        [A, None, (B, 3)],
        {"a": A, "b": [B]},
        OrderedDict(a=A, b=B),
        Named(A, "text"),
        Plain(A, [B]),
        Slotted(A, Plain(B)),
    ],
)
def test_tensors_are_found_and_replaced(value: Any) -> None:
    before = list(tensors_in(value))
    assert {id(t) for t in before} <= {id(A), id(B)}
    other = map_tensors(value, lambda t: t + 1)
    assert type(other) is type(value)
    assert list(tensors_in(value)) == before  # the same objects
    for old, new in zip(before, tensors_in(other), strict=True):
        assert torch.equal(new, old + 1)
    assert map_tensors(value, lambda t: t) is value


def test_other_objects_are_passed_on() -> None:
    class Cache:
        tensor: Tensor = A

    cache = Cache()
    assert map_tensors([cache], torch.neg)[0] is cache
    assert list(tensors_in(cache)) == []
    assert list(tensors_in(Plain)) == []  # a class
