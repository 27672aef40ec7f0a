"""Figure 1, by hand: what one attention step costs when it selects tokens, and when it rebuilds every one of them.

    python examples/figure_time_per_module.py        (all of it, on a GPU too: sals figures --only 1 --out DIR)

The same compressed cache is decoded over with two options of the compiler; the time is that of a whole step. So small
and uncompiled (lowering="eager", which starts at once), the two are close: rebuilding 1024 narrow keys costs little.
"""

import time

import torch
from quickstart import Model

prompt = torch.randint(0, 256, (1, 1024))
for attention in ("sals", "reconstruct"):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(capacity=2048).eval()
    options = {"attention": attention, "budget": 256, "lowering": "eager"}
    fast = torch.compile(model, backend="sals", options=options)
    with torch.no_grad():
        cache = model.new_cache()
        fast(prompt, torch.tensor(0), cache)  # prefill
        times = []
        for position in range(1024, 1034):
            start = time.perf_counter()
            fast(prompt[:, :1], torch.tensor(position), cache)
            times.append(time.perf_counter() - start)
    print(f"{attention:12} {1e3 * sorted(times)[len(times) // 2]:7.2f} ms per decode step over 1024 cached tokens")
