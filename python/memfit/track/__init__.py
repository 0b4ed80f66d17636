"""Measuring what a piece of code takes: :func:`memfit.track`.

``cpu`` and ``cuda`` count what torch allocates, ``owners`` names whose it is, ``steps`` tells one
step of training from the next, ``growth`` finds what grows from step to step, ``record`` is what
has been seen.
"""
