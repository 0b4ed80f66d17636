"""Structured pruning: a copy of a model without some of its channels.

``groups`` has what the engine found in the trace, ``scores`` says what channels are worth, ``cut``
copies model and optimizer without them, ``sizes`` mends the numbers that modules note, ``trial``
records the copy's step and has the engine compare, ``search`` finds the least pruning that is
enough, ``pruned`` puts these together, ``saved`` is the file. Which channels
belong together is the engine's (``crates/memfit-engine/src/prune``).
"""
