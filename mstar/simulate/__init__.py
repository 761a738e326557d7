"""Replays request traces through the cache's production code, without a model."""
