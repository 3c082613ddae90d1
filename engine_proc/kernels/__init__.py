"""Triton kernels for CUDA devices. Imported only where Triton is installed."""
