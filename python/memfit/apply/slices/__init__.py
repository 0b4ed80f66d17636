"""Slices: rows of a batch that pass through part of a step one piece after another.

``chunk`` finds where slices begin and end in the running model, ``in_slices`` and ``sliced_calls``
run modules and functions piece by piece, ``sliced_loss`` the loss, ``deferred`` is a result that
is not made yet, and ``weight_copies`` the weights for one that is made late. Not responsible for
the proof that rows are independent: the engine gives it.
"""
