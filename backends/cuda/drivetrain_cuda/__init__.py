"""The CUDA backend: torch's runtime and large products, the shared Triton kernels, CUDA graphs."""

__version__ = "0.1.0"
