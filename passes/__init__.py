"""FX graph to FX graph: each file one pass. Imports ``kernels`` and ``config``, nothing else of ours."""
