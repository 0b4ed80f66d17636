"""Several models in one memory: leases from a broker, parked models, pools of models.

``lease`` asks a broker for memory, ``idle`` gives it back when a process does nothing, ``park/``
moves a model out of memory and back, ``pool/`` keeps many under one budget.
"""
