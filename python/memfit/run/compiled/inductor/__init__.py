"""What is known of Inductor: what it fuses, and what its loops cost.

``fusion`` knows what Inductor never writes to memory, ``loops`` the words it says it in,
``op_costs`` what an op costs inside a kernel, ``rates`` what this machine does per second.
"""
