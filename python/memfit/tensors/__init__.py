"""What a tensor and an op are, beneath everything that records or runs them.

``operators`` knows torch's ops, ``storage`` the memory under a tensor, ``barrier`` stops its use,
``garbage`` holds Python's cycle collector off while memory is counted, ``heap`` is the C library's,
``versions`` how often it was written to, ``held`` is what a workload's functions hold.
"""
