"""Position ids and rotary embedding of every stream."""
