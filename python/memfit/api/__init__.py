"""The public functions: each takes a model or a plan, asks the rest of memfit, and answers.

What they return is in :mod:`memfit.answers`; what they raise, in :mod:`memfit.errors`.
"""
