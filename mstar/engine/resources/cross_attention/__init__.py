"""Cross attention: keys and values of encoder outputs, written once and shared by requests."""
