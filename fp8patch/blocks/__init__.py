"""Compiled blocks: `compiled.compile_blocks` is the way in.

`find` says which blocks there are, `calls` when they run compiled, `run` runs one, `graphs` replays
them as CUDA graphs, and `fuse` has activations and casts be one operator.
"""
