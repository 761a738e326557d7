"""Encoder outputs: what encoders made of items, kept by digest for the nodes that read it."""
