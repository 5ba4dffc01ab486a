"""`--compile` and `--cuda-graphs` for the models of a script."""

from typing import TYPE_CHECKING, Any

from torch import nn

from fp8patch import messages
from fp8patch.inject.record import rank

if TYPE_CHECKING:
    from fp8patch.blocks.compiled import CompiledBlocks
    from fp8patch.train_options import TrainOptions

__all__ = ["compile_model", "facts", "say_compiled"]


def compile_model(
    outermost: nn.Module, model: nn.Module, options: "TrainOptions"
) -> "CompiledBlocks | None":
    """Compile the blocks of `model`, which was just converted; None where that is not to be.

    Args:
        outermost: What the script calls: `model`, or its wrappers.
    """
    if not options.compiles:
        return None
    if _compiled_by_script(outermost):
        if rank() == 0:
            messages.note(
                f"{type(model).__name__}: the script compiles it by itself (torch.compile), so "
                f"{_flag(options)} leaves it alone."
            )
        return None
    from fp8patch.blocks.find import is_sharded

    graphs = options.cuda_graphs
    if graphs and is_sharded(outermost):
        graphs = False
        if rank() == 0:
            messages.warn(
                f"{type(model).__name__} is sharded (FSDP), and its weights lie elsewhere in every "
                "step: compiled, without CUDA graphs."
            )
    from fp8patch.blocks.compiled import compile_blocks

    found = compile_blocks(model, cuda_graphs=graphs)
    if not found.names:
        return None
    if rank() == 0:
        messages.note(
            f"{type(model).__name__}: what it repeats ({len(found.names)} in all) is compiled when "
            "it is first called after the observed step, which takes a while."
        )
    return found


def _flag(options: "TrainOptions") -> str:
    return "--cuda-graphs" if options.cuda_graphs else "--compile"


def _compiled_by_script(outermost: nn.Module) -> bool:
    return any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None
        for module in outermost.modules()
    )


def say_compiled(name: str, found: "CompiledBlocks") -> None:
    """What was compiled, in a line or two."""
    kinds = "; ".join(f"{count} of {where}" for where, count in found.compiled.items())
    what = "compiled"
    if found.cuda_graphs:
        what += ", as CUDA graphs" if found.ran_graphs else ", without CUDA graphs"
    cache = "; training ran with use_cache=False" if found.without_cache else ""
    if kinds:
        messages.note(f"{name}: blocks {what}: {kinds}{cache}.")
    for where, why in found.left.items():
        messages.note(f"{name}: left eager: {where}: {why}.")


def facts(found: "CompiledBlocks") -> dict[str, Any]:
    """The report's part, JSON-safe."""
    return {
        "blocks": len(found.names),
        "structures": dict(found.structures),
        "cuda_graphs": found.ran_graphs,
        "without_cache": found.without_cache,
        "left_eager": found.left,
    }
