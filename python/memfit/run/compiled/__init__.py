"""Plans under ``torch.compile``: the joint graph of forward and backward, cut for a budget.

``joint`` reads a joint graph, ``schedule`` says what a decision on it means and takes, ``search``
chooses one: ``as_trace`` asks the engine, ``block_boundaries`` goes further, ``inductor/`` has
costs and knows what Inductor never writes. ``partition`` writes it as two graphs. ``partitioner``
is what Inductor calls; ``recording`` sees a step's graphs beforehand, ``budget_shares`` divides the
budget among them, ``toolchain`` says whether Inductor can compile here, and ``fitted`` runs the
step. Equivalent class: Inductor fuses other partitions in other ways.

Much here is torch's own and behind underscores: torch has no public way to partition a joint graph.
"""

from __future__ import annotations
