"""Numbers in fewer bits: what is saved for backward.

Responsible for the forms and for writing numbers in them. Not responsible for when an activation is
shrunk or expanded: that is told with what is offloaded (:mod:`memfit.apply.offload.activations`).
"""
