"""Holding torch to a budget where it allocates: :func:`memfit.guard`.

``guard`` is the budget of a block of code, ``limit`` what holds it: ``cpu_limit``, ``cuda_limit``
and ``host_limit``, where torch allocates. ``leased`` follows a lease, ``overhead`` counts what
torch does not allocate, ``refused`` and ``holders`` say what filled the memory, ``backstop``
catches what nothing else did.
"""
