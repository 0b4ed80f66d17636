"""Planning, as far as Python has a part in it: the engine asks, and this answers.

``planner`` hands it a trace and what was asked, ``alternatives`` records the step in slices for it,
``cost_source`` says what ops cost, ``profiles`` keeps what was measured of this machine. Not
responsible for choosing: that is the engine's.
"""
