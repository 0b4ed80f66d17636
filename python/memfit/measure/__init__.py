"""Measuring what really happens: peaks, step times, op times and this machine's speed.

``peak`` measures the memory of a call, ``step_time`` compares the times of several, ``calibration``
measures this machine for the flat roofline, ``curves`` op by op and size by size, ``transfers``
copies and the disk. The engine only ever sees
the numbers.
"""

from memfit.measure.calibration import calibrate
from memfit.measure.peak import Measured, measure_peak, static_tensors
from memfit.measure.step_time import cpu_seconds_in_turn, paired_cpu_seconds

__all__ = [
    "Measured",
    "calibrate",
    "cpu_seconds_in_turn",
    "measure_peak",
    "paired_cpu_seconds",
    "static_tensors",
]
