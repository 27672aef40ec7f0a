"""Figure 2, by hand: the rotary embedding spreads keys over more directions, so a latent is taken from before it.

python examples/figure_rotary_pca.py        (a real model, every layer: sals figures --only 2 --out DIR)
"""

import torch
from quickstart import Model

from sals_compile.calibrate import calibrate


def rank_90(moment):
    """How many directions keep 90 % of a second moment ``[E, E]``."""
    energy = torch.linalg.eigvalsh(moment.double()).flip(0)
    return int((energy.cumsum(0) / energy.sum() < 0.9).sum()) + 1


torch.manual_seed(0)
model = Model(capacity=1024).eval()
cache = model.new_cache()
call = {"tokens": torch.randint(0, 256, (1, 1024)), "start": torch.tensor(0), "cache": cache}
made = calibrate(model, [call], progress=False)  # it observes keys as they are before the embedding ...

for (name, moments), (keys, _) in zip(made.sites.items(), cache, strict=True):
    after = keys[0].transpose(0, 1).flatten(1)  # ... and the model's own cache holds them after it: [S, E]
    width = after.shape[1]
    print(f"{name}: rank for 90 %: {rank_90(moments.key_moment)} before, {rank_90(after.T @ after)} after, of {width}")
