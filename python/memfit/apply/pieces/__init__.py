"""Pieces: a model's call on one part of its batch after the other, inside a script's own step.

``in_pieces`` is the part of the executor, ``call`` one call from its forward to its backward,
``stand_ins`` parameters that collect gradients by themselves, ``whole_draws`` random numbers. Not
responsible for the proof that the items of a batch are treated apart.
"""
