"""Models without weights, built in no memory, and weights that are quantised when read."""
