"""sals-compile: ``torch.compile(model, backend="sals")`` makes long-context attention cheap.

The attention of any traced PyTorch model is found, proved and rewritten into SALS attention (Sparse Attention in Latent
Space, arXiv 2510.24273): keys kept as a low-rank latent from before the rotary embedding, top-k token selection in that
latent, and sparse attention over the tokens chosen.
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
