"""Export for serving in FP8: `directory.export_directory` is the way in.

`layers` says which weights, `formats` and `torchao` what is stored for each, `weights` and `writer`
write it.
"""
