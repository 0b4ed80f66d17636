"""Parking: a model's memory given back, and had back at the same addresses.

Responsible, by file: ``layout.py`` which tensors of a model can be parked and where they lie,
``cuda_memory.py`` memory of a GPU for them, ``parked.py`` the model that is parked and woken. Not
responsible for pages and files (``crates/memfit-memory/src/park``,
``crates/memfit-memory/src/arena``), nor for when to park (:mod:`memfit.share.pool`).
"""
