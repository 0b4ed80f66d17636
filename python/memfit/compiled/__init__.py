"""Plans under ``torch.compile``: the joint graph of forward and backward, cut for a budget.

``joint`` reads a joint graph, ``schedule`` says what a decision on it means and takes, ``search``
chooses one: ``as_trace`` asks the engine, ``chains`` goes further, ``nominal`` has costs, and
``fusion`` knows what Inductor never writes (in the words of ``as_loops``). ``partition`` writes it
as two graphs. ``partitioner`` is what Inductor calls; ``recording`` sees a step's graphs
beforehand, ``shares`` divides the budget among them, ``toolchain`` says whether Inductor can
compile here, and ``fitted`` runs the step. Equivalent class: Inductor fuses other partitions in
other ways.

Much here is torch's own and behind underscores: torch has no public way to partition a joint graph.
"""

from __future__ import annotations
