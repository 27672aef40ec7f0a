"""The arithmetic of SALS: operators, what they mean, and the Triton kernels that run them.

Imports nothing of ``sals_compile`` or ``passes``. Nothing is imported here on purpose: with the repository's root on
``sys.path`` this folder is importable as ``kernels``, the name of a package that transformers probes for.
"""
