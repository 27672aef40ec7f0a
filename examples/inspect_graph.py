"""Look at what the compiler would do to a model before running anything: as a table, a networkx graph, a picture and a
page.

    python examples/inspect_graph.py [FOLDER]        # writes decode.html and after.dot there (default: out)
"""

import logging
import sys
from collections import Counter
from pathlib import Path

import torch
from quickstart import Model

import sals_compile

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("sals_compile").setLevel(logging.INFO)  # one line per graph; DEBUG adds the reasons

torch.manual_seed(0)
model = Model().eval()
token, position = torch.zeros(1, 1, dtype=torch.int64), torch.tensor(1500)

# explain() traces the call, matches and rewrites it, and compiles nothing. Its arguments are copied: no cache of
# yours changes.
found = sals_compile.explain(model, token, position, model.new_cache(), options={"budget": 256})
print(found, "\n")  # `sals explain --help` says what the columns mean

# Every site is a record; a declined one says what was missed.
for site in found.sites:
    stored, dense = site.kv_bytes_per_token, site.dense_bytes_per_token
    print(f"{site.name}: {site.status}, mask {site.mask}, {stored:.0f} of {dense:.0f} bytes per token")

# The graphs are ordinary FX modules ...
kinds = Counter(str(n.target) for n in found.graph_after.graph.nodes if str(n.target).startswith("sals."))
print("\noperators in the rewritten graph:", dict(kinds))

# ... and one networkx graph holds both, before and after.
graph = found.to_networkx()
gone = [n for n, d in graph.nodes(data=True) if d["before"] and not d["after"]]
new = [n for n, d in graph.nodes(data=True) if d["after"] and not d["before"]]
print(f"{len(gone)} nodes went, {len(new)} came, of {graph.number_of_nodes()}")

folder.mkdir(parents=True, exist_ok=True)
found.save_html(folder / "decode.html")
print(f"the whole story: {folder / 'decode.html'}")
try:
    found.draw(folder / "after.dot")  # .svg, .png and .pdf work too where Graphviz is installed
except ImportError as error:
    print(error)
