"""sals-compile: ``torch.compile(model, backend="sals")`` makes long-context attention cheap.

The attention of any traced PyTorch model is found, proved and rewritten into SALS attention (Sparse Attention in Latent
Space, arXiv 2510.24273): keys kept as a low-rank latent from before the rotary embedding, top-k token selection in that
latent, and sparse attention over the tokens chosen. What is not understood is left as it was, with the reason.

    fast = torch.compile(model, backend="sals", options={"budget": 512})       # options: class SalsConfig
    print(sals_compile.compiled_reports()[-1])                                 # what became of each attention site

Where to look:

- ``SalsConfig``: every option; ``OptionError``: a bad one; ``DeclinedError``: a site declined under
  ``on_decline="error"``; ``sals``: the backend itself, which ``torch.compile`` calls.
- ``explain(fn, *args)``: what the compiler would do to a call, before anything is compiled: an ``Explanation`` of
  ``GraphReport``, each of ``SiteReport``; as a table, FX graphs, networkx, a picture or a page.
- ``compiled_reports()``: the same of what was compiled in this process.
- ``calibrate(model, batches)``: a ``Calibration``, which is saved as safetensors and given as option ``calibration``.
- ``sals_compile.integrations.transformers.SalsCache`` and ``sals_compile.integrations.modules.LatentCache``: KV caches
  without dense keys and values.
- ``sals_compile.mlir.export``: the rewritten graph as MLIR.
- ``sals_compile.kernels.reference``: what each ``sals::`` operator means, in plain PyTorch.
- The command ``sals``: ``sals --help``.

Symbols in shapes: ``B`` batch, ``S`` cache slots, ``L`` new tokens of a call, ``H`` query heads, ``N`` KV heads, ``D``
head dim, ``E = N*D`` joint key width, ``R`` rank, ``Rs`` score rank, ``T`` tokens attended per query, ``W`` recent
tokens kept exact.
"""

from .backend import DeclinedError, sals
from .calibrate import Calibration, CalibrationError, calibrate
from .config import OptionError, SalsConfig
from .report import Explanation, GraphReport, SiteReport, compiled_reports, explain

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "CalibrationError",
    "DeclinedError",
    "Explanation",
    "GraphReport",
    "OptionError",
    "SalsConfig",
    "SiteReport",
    "__version__",
    "calibrate",
    "compiled_reports",
    "explain",
    "sals",
]
