"""Figure 3, by hand: decode steps of a small model, dense and SALS, with the query projection whole and factored.

    python examples/figure_speedup.py        (a large model, on a GPU too: sals figures --only 3 --out DIR)

So small and uncompiled (lowering="eager", which starts at once), SALS is the slower one: its operators cost more than
reading a short, narrow cache does. What to look at is how the times grow; `make demo` shows a real model, compiled.
"""

import time

import torch
from quickstart import Model

import sals_compile

methods = {"dense": None, "SALS": {}, "SALS, query rank 32": {"query_rank": 32}}
for tokens in (1024, 4096):
    for name, options in methods.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Model(capacity=tokens + 128).eval()
        forward = model
        if options is not None:
            forward = torch.compile(model, backend="sals", options={"budget": 256, "lowering": "eager"} | options)
        with torch.no_grad():
            cache = model.new_cache()
            forward(torch.randint(0, 256, (1, tokens)), torch.tensor(0), cache)
            times = []
            for position in range(tokens, tokens + 10):
                start = time.perf_counter()
                forward(torch.tensor([[7]]), torch.tensor(position), cache)
                times.append(time.perf_counter() - start)
        note = ""
        if options:
            site = sals_compile.compiled_reports()[-1].sites[0]
            note = f"; query rank {site.query_rank} keeps {site.query_retained:.2f} of the variance"
        print(f"{tokens} cached tokens, {name}: {1e3 * sorted(times)[5]:.2f} ms per step{note}")
