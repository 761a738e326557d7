"""One model on several devices: ranks, their shares and their sums."""
