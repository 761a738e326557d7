"""Attention over the paged KV cache, by interchangeable backends."""
