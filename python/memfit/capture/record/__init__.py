"""What is recorded of a step: its ops, the memory they make and read, what autograd saves.

``step`` runs a step under the recorder; ``recorder`` sees every op, ``ledger`` every allocation,
``saves`` every saved tensor, ``module_calls`` and ``source_line`` where in the model it happened,
``shadow`` what a fake tensor cannot say, ``decoding`` what `generate` asks of tokens,
``view_replays`` views that autograd makes again.
``roles`` says what allocations are for, ``step_loss`` how the loss reduces over the batch.
"""
