"""Calibrate once, keep the file, and decode sparsely from the first token of the next process.

    python examples/calibrate_and_reload.py

Without a calibration the first long prompt is the calibration: it runs dense, and its decoding is sparse.
"""

import tempfile
from pathlib import Path

import torch
from quickstart import Model, generate

import sals_compile
from sals_compile.calibrate import Calibration, calibrate

torch.manual_seed(0)
model = Model(capacity=1024).eval()
# Token ids [B, S] would do for a model that takes them alone; this one also wants a position and a cache, by keyword.
texts = torch.randint(0, 256, (4, 1, 512))  # stands for real text like that to come
calls = ({"tokens": t, "start": torch.tensor(0), "cache": model.new_cache()} for t in texts)
made = calibrate(model, calls, progress=False)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "basis.safetensors"
    made.save(path)
    print(f"{len(made.sites)} sites in {path.stat().st_size} bytes: {', '.join(made.sites)}")
    loaded = Calibration.load(path)  # no pickle; a version and the model's fingerprint are checked

    fast = torch.compile(model, backend="sals", options={"budget": 256, "lowering": "eager", "calibration": str(path)})
    prompt = torch.randint(0, 256, (1, 600))
    dense, sparse = (generate(f, model.new_cache(), prompt, 8) for f in (model, fast))
    print(sals_compile.compiled_reports()[-1])
    print(f"relative difference of the logits to dense: {float((sparse - dense).norm() / dense.norm()):.3f}")
