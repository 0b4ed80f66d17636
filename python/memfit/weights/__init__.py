"""Models without weights: built at full size in no memory, for capture alone."""
