"""`fp8patch doctor`: `examine.examine` puts together what the others find out.

`machine` asks what is installed, `environment` which settings interfere, `gemms` and `casts` test
the hardware, `peers` other libraries, and `advice` draws the conclusion; `types` are the findings.
"""
