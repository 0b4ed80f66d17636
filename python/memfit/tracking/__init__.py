"""Measuring what a piece of code takes: ``memfit.track`` and ``memfit run``.

Named apart from :func:`memfit.track`, which a module of that name would hide.
"""
