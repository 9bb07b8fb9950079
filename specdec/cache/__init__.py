"""KV caches: which tokens have been consumed, where their keys and values are, and how they are rolled back."""
