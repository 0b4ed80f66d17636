"""Where a step is recorded: on fake tensors, for CUDA or a CPU, or on real ones at a small batch.

``stage`` is what they have in common, ``arguments`` and ``call_shape`` make the tensors of a batch,
``backward_engine`` runs backward where autograd's own engine cannot.
"""
