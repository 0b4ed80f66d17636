"""Holding torch to a budget where it allocates: ``memfit.guard``.

Named apart from :func:`memfit.guard`, which a module of that name would hide.
"""
