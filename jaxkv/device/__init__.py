"""Device side: pure functions of jax arrays, no Python state, never the host side."""
