"""What a recorded step cannot say and a small experiment can.

``workspace`` and ``scratch_ops`` measure the memory that kernels take for themselves,
``optimizer_updates`` what one update of the optimizer does, ``any_scalar`` stands for a number that
only a real step knows.
"""
