"""Eight simulated devices, and the strictest settings, for every test."""

import jax

from jaxkv import testing

testing.simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
