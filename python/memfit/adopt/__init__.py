"""Fitting a training script that knows nothing of memfit: ``memfit run --budget``."""
