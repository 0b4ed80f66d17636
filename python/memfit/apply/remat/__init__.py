"""Rematerialisation: activations are dropped in forward and computed again when backward asks.

``remat`` decides for each saved tensor, ``watch`` sees a step's ops, ``records`` keeps what an op
needs to run again, ``replay`` runs it, ``randomness`` gives it the random numbers it had,
``directions`` says which tensors a plan names, ``saved_memory`` whose memory is written to after it
was saved. Not responsible for what is dropped: the plan says.
"""
