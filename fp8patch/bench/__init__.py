"""`fp8patch bench`: `run.run` measures contenders side by side, in turns on one GPU.

What is trained is in `workloads` and `gpt`, who trains it in `contenders` and `te`. `groups`,
`turns` and `process` are the parent's side of it, `worker` and `measure` a contender's own process,
`report` and `facts` what comes out. `gemm` and `fit` make the tables that plans predict from.
"""
