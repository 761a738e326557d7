"""From logits to token ids: rules, seeds and log-probabilities."""
