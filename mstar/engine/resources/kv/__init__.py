"""The paged KV cache: pages named by content, shared between requests."""
