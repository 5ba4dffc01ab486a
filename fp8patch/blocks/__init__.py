"""Compiled blocks: `compiled.compile_blocks` is the way in.

`find` says which blocks there are, `calls` when they run compiled, `run` runs one, and `graphs`
replays them as CUDA graphs.
"""
