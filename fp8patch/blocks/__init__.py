"""Compiled blocks: `compiled.compile_blocks` is the way in.

`find` says which blocks there are, `calls` when they run compiled, `run` runs one, and `compiling`
compiles it; `places` is what a graph takes instead of slots. Passes over the graphs: `fuse` has
activations and casts be one operator, `keep_less` has backward make what it can. As CUDA graphs:
`graphs` says when, `replay` what is recorded and run, `recorded` is one block's, `memory` what they
share, and `capture` is CUDA's side.
"""
