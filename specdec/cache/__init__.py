"""KV caches: what has been consumed, where its keys and values lie, and how it is taken back."""
