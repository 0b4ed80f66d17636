"""Carrying out a plan on an unmodified model, one technique a file.

``remat`` drops activations and computes them again, ``offload`` keeps them elsewhere, ``optimizer``
runs the optimizer inside backward, ``offload_optimizer`` keeps its state elsewhere,
``offload_parameters`` parameters, ``microbatch`` cuts the batch, ``allocator`` sets up the caching
allocator.
:class:`memfit.fitted.Fitted` puts them together. What each does to memory is defined in
``docs/concepts/transformed-trace.md``.
"""
