"""What compiled blocks and CUDA graphs cost and gain on one model, a line of JSON for each way.

    python scripts/time_blocks.py bert-base|bert-large|llama-4l [eager compile graphs …] [--bf16]

`begin_ms` is what a step pays for knowing that it may replay; `dispatch_ms` is the CPU time of a
whole step, with the GPU not waited for. `fp8patch bench` compares with others; this looks inside.
"""

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
import transformers

import fp8patch
from fp8patch.blocks import graphs, memory

STEPS, WARM_UP = 12, 8


def build(name: str) -> tuple[Any, tuple[int, int]]:
    torch.manual_seed(0)
    if name == "llama-4l":
        config: Any = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
        return transformers.LlamaForCausalLM(config), (4, 2048)
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    large |= {"num_attention_heads": 16, "vocab_size": 28996}
    config = transformers.BertConfig(**(large if name == "bert-large" else {}))
    return transformers.BertForMaskedLM(config), (24, 512) if name == "bert-large" else (32, 128)


def measure(name: str, way: str, bf16: bool) -> dict[str, Any]:
    model, (rows, length) = build(name)
    model = model.cuda().train()
    if not bf16:
        fp8patch.convert_model(model)
    left = None
    if way != "eager":
        left = fp8patch.compile_blocks(model, cuda_graphs=way == "graphs")
    recorded = memory.recorded()
    begin: list[float] = []
    stock = graphs.Graphs.begin

    def timed(self: Any) -> Any:
        started = time.perf_counter()
        mode = stock(self)
        begin.append(1000 * (time.perf_counter() - started))
        return mode

    graphs.Graphs.begin = timed  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 28996, (rows, length), device="cuda")
    labels = torch.where(torch.rand(rows, length, device="cuda") > 0.15, -100, ids)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(enabled=not bf16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    started = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    warm_up = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats()
    times, dispatch = [], []
    for _ in range(STEPS):
        events = [torch.cuda.Event(enable_timing=True) for _ in "ab"]
        started = time.perf_counter()
        events[0].record()
        step()
        events[1].record()
        dispatch.append(1000 * (time.perf_counter() - started))
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    graphs.Graphs.begin = stock  # type: ignore[method-assign]
    return {
        "model": name,
        "way": way,
        "fp8": not bf16,
        "step_ms": round(statistics.median(times), 2),
        "dispatch_ms": round(statistics.median(dispatch), 2),
        "begin_ms": round(statistics.median(begin[-STEPS:]), 3) if begin else None,
        "warm_up_s": round(warm_up, 1),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "recorded": memory.recorded() - recorded,
        "left": None if left is None else left.left,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=("bert-base", "bert-large", "llama-4l"))
    parser.add_argument("ways", nargs="*", default=["eager", "compile", "graphs"])
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    for way in given.ways:
        print(json.dumps(measure(given.model, way, given.bf16)), flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
