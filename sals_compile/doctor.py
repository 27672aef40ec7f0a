"""``sals doctor``: what is installed, which devices there are, what would run where, and a short self-test with
verdicts.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from .kernels import codegen, ops
from .report import explain

#: distribution -> what it is for; "" when the package needs it always.
PACKAGES = {
    "torch": "",
    "triton": "GPU kernels",
    "networkx": "",
    "safetensors": "",
    "numpy": "",
    "transformers": "generate() of Hugging Face models",
    "pydot": "draw()",
    "pygments": "highlighted sources in save_html()",
    "torch-mlir": "mlir.export() and lowering='mlir'",
    "iree-base-compiler": "lowering='mlir'",
    "iree-base-runtime": "lowering='mlir'",
}


@dataclass(frozen=True)
class Check:
    """One self-test: ``verdict`` is ``ok``, ``failed`` or ``skipped``; ``detail``: what was measured, or why not."""

    name: str
    verdict: str
    detail: str
    seconds: float = 0.0


def versions() -> dict[str, str]:
    """Installed versions by distribution; ``""`` where absent. Python's own is under ``python``."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def devices() -> list[dict[str, Any]]:
    """The CPU (threads) and each GPU (name, memory in bytes, architecture)."""
    found: list[dict[str, Any]] = [{"device": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": facts.name,
                "memory": facts.total_memory,
                "architecture": getattr(facts, "gcnArchName", "") or f"sm_{facts.major}{facts.minor}",
            }
        )
    return found


def routes() -> list[dict[str, str]]:
    """What would run where: for each lowering and kind of device, what runs there or what is missing."""
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "c++", "clang++") if c and shutil.which(c)), None)
    from .kernels import dispatch

    gpu, triton = torch.cuda.is_available(), dispatch.has_triton()
    kernels = ", ".join(sorted(dispatch.TRITON)) if triton else ""
    mlir = find_spec("torch_mlir") is not None and find_spec("iree") is not None
    return [
        {
            "lowering": "inductor",
            "device": "cpu",
            "runs": f"reference operators compiled by Inductor with {compiler}"
            if compiler
            else "no: needs a C++ compiler (g++)",
        },
        {
            "lowering": "inductor",
            "device": "gpu",
            "runs": (
                "no: no GPU is visible"
                if not gpu
                else f"Triton kernels: {kernels}"
                if triton
                else "reference operators: no Triton"
            ),
        },
        {"lowering": "eager", "device": "any", "runs": "the rewritten graph, operator by operator"},
        {
            "lowering": "mlir",
            "device": "cpu",
            "runs": "torch-mlir and IREE (llvm-cpu)" if mlir else "no: pip install 'sals-compile[mlir]'",
        },
    ]


class _Layer(nn.Module):
    """One attention layer with a static cache, rotary embedding and grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor, start: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        slots = torch.arange(x.shape[1], device=x.device) + start
        angles = (slots[:, None] / 100 ** (torch.arange(8, device=x.device) / 8)).repeat(1, 2)

        def heads(t: Tensor) -> Tensor:
            return t.view(1, -1, t.shape[-1] // 16, 16).transpose(1, 2)

        def rotate(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

        keys.index_copy_(2, slots, rotate(heads(self.k(x))))
        values.index_copy_(2, slots, heads(self.v(x)))
        mask = torch.arange(keys.shape[2], device=x.device)[None, :] <= slots[:, None]
        query = rotate(heads(self.q(x)))
        return nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


@torch.no_grad()
def _roll(forward: Callable[..., Tensor], x: Tensor, prompt: int) -> Tensor:
    keys = x.new_zeros(1, 2, 160, 16)
    values = torch.zeros_like(keys)
    pieces = [forward(x[:, :prompt], torch.tensor(0, device=x.device), keys, values)]
    for i in range(prompt, x.shape[1]):
        pieces.append(forward(x[:, i : i + 1], torch.tensor(i, device=x.device), keys, values))
    return torch.cat(pieces[1:], 2)


#: Random weights have no low-rank structure to find, so the self-test keeps the full rank and looks at selection and
#: storage alone.
_SMALL = {"budget": 126, "sinks": 4, "recents": 16, "rank": 1.0, "score_rank": 1.0, "value_bits": 8}


def _decode(options: Mapping[str, Any], device: str, limit: float, prompt: int = 128) -> str:
    torch.manual_seed(0)
    layer = _Layer().eval().to(device)
    x = torch.randn(1, prompt + 6, 64, device=device)
    torch._dynamo.reset()
    actual = _roll(torch.compile(layer, backend="sals", options=dict(options)), x, prompt)
    expected = _roll(layer, x, prompt)
    error = float((actual - expected).norm() / expected.norm())
    if not error <= limit:
        raise AssertionError(f"relative difference to dense {error:.1e}, more than {limit:.0e}")
    return f"relative difference to dense {error:.1e} (limit {limit:.0e})"


def _matches() -> str:
    layer = _Layer().eval()
    keys = torch.zeros(1, 2, 160, 16)
    found = explain(layer, torch.zeros(1, 1, 64), torch.tensor(9), keys, keys.clone(), options=_SMALL)
    (site,) = found.sites
    if site.status != "sals":
        raise AssertionError(f"the site was left {site.status}: {site.reason}")
    return f"rotary {site.rotary}, mask {site.mask}, verified to {site.verified_error:.0e}"


def _listed() -> str:
    if "sals" not in torch._dynamo.list_backends():
        raise AssertionError("torch.compile does not list 'sals': reinstall the package (its entry point is missing)")
    return "torch.compile lists the backend"


def _writable() -> str:
    path = codegen.write("# written by `sals doctor`\n")
    path.unlink()
    if path.parent != codegen.cache_directory():
        raise AssertionError(f"{codegen.cache_directory()} cannot be written; a temporary folder is used instead")
    return str(path.parent)


def _mlir() -> str:
    return _decode({"lowering": "mlir", "attention": "exact"}, "cpu", 1e-4, 1)


def self_test(report: Callable[[Check], None] = lambda check: None) -> list[Check]:
    """Run every check that the machine allows; ``report`` is told of each as it ends."""
    route = {(r["lowering"], r["device"]): r["runs"] for r in routes()}
    absent = {k: v.removeprefix("no: ") if v.startswith("no: ") else "" for k, v in route.items()}
    eager, exact = {"lowering": "eager"}, {"attention": "exact"}
    checks: list[tuple[str, str, Callable[[], str]]] = [
        ("backend is registered", "", _listed),
        ("attention is found and verified", "", _matches),
        ("generated kernels can be written", "", _writable),
        ("exact decode, eager", "", lambda: _decode(eager | exact, "cpu", 1e-4)),
        ("sparse decode, eager", "", lambda: _decode(eager | _SMALL, "cpu", 0.3)),
        ("exact decode, Inductor", absent["inductor", "cpu"], lambda: _decode(exact, "cpu", 1e-4, 1)),
        ("exact decode, GPU", absent["inductor", "gpu"], lambda: _decode(exact, "cuda", 1e-3)),
        ("sparse decode, GPU", absent["inductor", "gpu"], lambda: _decode(_SMALL, "cuda", 0.3)),
        ("exact decode, MLIR", absent["mlir", "cpu"], _mlir),
    ]
    results = []
    for name, reason, run in checks:
        start = time.perf_counter()
        if reason:
            check = Check(name, "skipped", reason)
        else:
            try:
                check = Check(name, "ok", run(), time.perf_counter() - start)
            except Exception as error:  # a check must not stop the others
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = (
                    "" if isinstance(error, AssertionError) else f" ({os.path.basename(last.filename)}:{last.lineno})"
                )
                first = (str(error).strip().splitlines() or [""])[0]
                check = Check(name, "failed", f"{type(error).__name__}: {first}{where}", time.perf_counter() - start)
        results.append(check)
        report(check)
    return results


def as_dict(checks: list[Check]) -> dict[str, Any]:
    """What ``sals doctor --json`` prints."""
    return {
        "versions": versions(),
        "devices": devices(),
        "routes": routes(),
        "operators": sorted(ops.SCHEMAS),
        "checks": [asdict(c) for c in checks],
        "ok": all(c.verdict != "failed" for c in checks),
    }
