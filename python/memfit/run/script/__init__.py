"""Fitting a training script that knows nothing of memfit: ``memfit run``.

``launcher`` runs the script, ``script`` and ``signals`` see its steps, ``observed`` and
``recorded_step`` make a trace of one, ``loop`` carries plans through the next, ``lease`` and
``spill``, ``stash`` are the memory and the folder it was given, ``summary``, ``announce`` say what
happened.
"""
