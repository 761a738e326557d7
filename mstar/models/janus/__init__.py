"""Janus: pictures in and out."""
