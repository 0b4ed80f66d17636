"""What ``memfit doctor`` asks of Python: what is installed, and which features work with it.

``facts.py`` says what is there, ``trials.py`` tries what can be tried in a moment, ``step.py`` is
the tiny step that the program predicts, plans and runs.
"""

from memfit.doctor.facts import examine

__all__ = ["examine"]
