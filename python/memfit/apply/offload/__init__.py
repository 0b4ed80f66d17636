"""Offloading: memory that a step does not need for a while lies in host memory or in a file.

``activations`` offloads what backward needs later, ``optimizer_state`` and ``parameters`` what the
optimizer and the model keep, ``tiers`` is where the bytes lie, ``pinned`` and ``cuda_copies`` move
them to and from a GPU, ``place`` names the place a user asked for. Not responsible for what is
offloaded: the plan says.
"""
