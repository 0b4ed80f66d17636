"""Carrying out a plan on an unmodified model, one technique a room.

``remat/`` drops activations and computes them again, ``offload/`` offloads activations, optimizer
state and parameters, ``slices/`` runs rows piece by piece, ``optimizer_in_backward`` updates each
parameter as soon as its gradient is there, ``micro_batch`` cuts the batch, ``allocator_settings``
sets up the caching allocator.
:class:`memfit.run.fitted.Fitted` puts them together. What each does to memory is defined in
``docs/concepts/transformed-trace.md``.
"""
