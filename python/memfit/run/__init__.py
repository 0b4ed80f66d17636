"""Running a plan: the drivers that carry a step through it.

``fitted`` drives a workload's step, eager; ``compiled/`` one under ``torch.compile``; ``script/``
the steps of a script that knows nothing of memfit; ``elastic`` follows a lease that changes,
``recovery`` repeats a step that ran out of memory, ``step_backup`` keeps what the repetition needs,
``profile`` times every op of a step.
"""
