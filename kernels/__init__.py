"""The arithmetic of SALS: operators, what they mean, and the Triton kernels that run them.

Imports nothing of ``sals_compile`` or ``passes``.
"""
