"""Triton kernels: each equals its CPU form bit for bit. Imported where an input is on CUDA."""
