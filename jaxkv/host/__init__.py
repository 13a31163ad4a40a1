"""Host side: pages, requests and plans in numpy; nothing here imports jax."""
