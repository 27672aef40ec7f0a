"""Is it still my model? Exact mode (full rank, nothing quantised, every token) must reproduce the dense one; then see
what sparsity costs.

    python examples/verify_your_model.py

Replace ``Model`` and ``run`` by your own: anything that ``torch.compile`` takes, called the way you call it.
"""

import torch
from quickstart import Model, generate

import sals_compile


def run(forward, model, prompt):
    """Logits of 8 decode steps ``[8, vocabulary]`` after a prefill."""
    return generate(forward, model.new_cache(), prompt, 8)


torch.manual_seed(0)
model, prompt = Model(capacity=1024).eval(), torch.randint(0, 256, (1, 700))
dense = run(model, model, prompt)
settings = {
    "exact": {"attention": "exact"},
    "reconstruct": {"attention": "reconstruct"},
    "sals, budget 512": {"budget": 512},
    "sals, budget 256": {"budget": 256},
}
for name, options in settings.items():
    torch._dynamo.reset()
    # on_decline="error" turns a site that was not understood into an exception with the reasons.
    options |= {"on_decline": "error", "lowering": "eager"}
    logits = run(torch.compile(model, backend="sals", options=options), model, prompt)
    error = float((logits - dense).norm() / dense.norm())
    agree = float((logits.argmax(-1) == dense.argmax(-1)).float().mean())
    report = sals_compile.compiled_reports()[-1]
    print(f"{name:18} {report.rewritten} sites rewritten, relative difference {error:.1e}, same token {agree:.2f}")
    if name == "exact" and not error < 1e-4:
        raise SystemExit("exact mode differs from dense: please report this model")
