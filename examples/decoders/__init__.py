"""Decoders in Flax NNX that run on a jaxkv pool, small enough to copy."""
