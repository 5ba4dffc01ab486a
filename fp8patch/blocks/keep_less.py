"""A pass over Inductor's joint graph: what backward can make itself is not kept for it.

It runs before forward and backward are taken apart, for it changes what is kept. (fuse.py is the
pass that runs after.)
"""

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fp8patch.blocks import fuse, fuse_backward, graph_casts, patterns, recast


class KeepLess(CustomGraphPass):
    """For `torch.compile(options={"joint_custom_post_pass": KeepLess()})`."""

    def __call__(self, graph: Graph) -> None:
        casts = graph_casts.casts_with_transpose(graph)
        fused = fuse_backward.fuse_backward(graph, casts)
        if fused + recast.recast(graph, graph_casts.casts_with_transpose(graph)):
            from torch._inductor.pattern_matcher import stable_topological_sort

            # What reads a transpose stands before what writes it now.
            stable_topological_sort(graph)
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        modules = (fuse, patterns, graph_casts, fuse_backward, recast)
        return fuse.files_hash(__file__, *(str(module.__file__) for module in modules))


KEEP_LESS = KeepLess()
