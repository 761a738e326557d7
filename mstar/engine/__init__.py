"""The engine: requests walk over a model's graph; nothing here knows a model by name."""
