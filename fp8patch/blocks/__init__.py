"""Compiled blocks: `compiled.compile_blocks` is the way in.

`find` says which blocks there are, `calls` when they run compiled, and `run` runs one; `places` is
what a graph takes instead of slots. Passes over the graphs: `fuse` has activations and casts be one
operator, `keep_less` has backward make what it can. As CUDA graphs: `graphs` says when, `replay`
what is recorded and run, `recorded` is one block's, and `memory` what they share.
"""
