"""Runs that can be stopped and resumed, for test_resume.py, which also runs this as a script.

`python resume_cases.py DIRECTORY` resumes every run that was stopped below DIRECTORY.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import fp8patch

CASES = ("llama-delayed", "llama-current", "gpt2-delayed", "gpt2-current", "bert-delayed")

VOCABULARY, BATCH, TOKENS = 64, 2, 7
ACCUMULATION = 2
# In micro-batches: 20 optimizer steps, and the stop after the 10th.
END, STOP = 40, 20


def build(architecture: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
    if architecture == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            **sizes,
        )
        return transformers.LlamaForCausalLM(config)
    if architecture == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        **sizes,
    )
    return transformers.BertForMaskedLM(config)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@contextmanager
def fp8() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
        yield


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)


def evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad(), fp8():
        model(input_ids=batch(1000))
    model.train()


def train(model: Any, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    """Micro-batches [start, stop), two a step, and an evaluation after every fifth step."""
    losses = []
    model.train()
    for number in range(start, stop):
        torch.manual_seed(number)  # dropout
        tokens = batch(number)
        with fp8():
            loss = model(input_ids=tokens, labels=tokens).loss
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if number % ACCUMULATION == ACCUMULATION - 1:
            optimizer.step()
            optimizer.zero_grad()
        if number % (5 * ACCUMULATION) == 5 * ACCUMULATION - 1:
            evaluate(model)
    return losses


def outcome(model: Any, losses: list[float]) -> dict[str, Any]:
    """Everything that must be equal: losses, weights, FP8 state."""
    bank = model._fp8_bank
    roles = ("input", "weight", "grad_output")
    state = {
        f"{path}.{roles[role]}.{name}": value
        for (path, role), slot in bank.state()
        for name, value in slot._asdict().items()
    }
    notes = {
        "siblings": dict(bank.siblings),
        "norms": sorted(bank.low_precision_norms),
        "observed": bank.observed,
        "due": bank.due,
    }
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": weights, "state": state, "notes": notes}


def assert_equal(actual: Any, expected: Any, where: str = "") -> None:
    """Equal to the last bit, through dicts."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{where}/{key}")
    elif isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


def start(case: str) -> tuple[Any, torch.optim.Optimizer]:
    architecture, recipe = case.split("-")
    model = fp8patch.convert_model(build(architecture), recipe)
    return model, optimizer_of(model)


def stop_here(model: Any, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    model.save_pretrained(directory)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.save([optimizer.state_dict(), gradients], directory / "optimizer.pt")


def resume(directory: Path) -> tuple[Any, torch.optim.Optimizer]:
    model = fp8patch.load(directory)
    optimizer = optimizer_of(model)
    state, gradients = torch.load(directory / "optimizer.pt")
    optimizer.load_state_dict(state)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    return model, optimizer


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    for case in CASES:
        model, optimizer = resume(directory / case)
        losses = train(model, optimizer, STOP, END)
        torch.save(outcome(model, losses), directory / case / "outcome.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
