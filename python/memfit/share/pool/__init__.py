"""A pool: many models under one budget in one process.

Responsible, by file: ``pool.py`` the pool and its threads, ``device.py`` which device it is of,
``activations.py`` what a call takes besides the model, ``law.py`` what one of other sizes does,
``calls.py`` calls seen before they run, ``measured.py`` what they really took, ``leased.py`` a
budget that follows a lease, ``held.py`` uses under a guard, ``refusals.py`` errors,
``statistics.py`` numbers.
Not responsible for who is in memory (``crates/memfit-engine/src/share/pool``), nor for moving a
model out and in (:mod:`memfit.share.park`).
"""
