"""Kernels in Triton that backends share. A backend says what its device is (``Target``) and asks ``provide``.

Torch-free until a module with kernels is imported.
"""

__version__ = "0.1.0"
