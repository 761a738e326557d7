"""What turns requests into token ids and tokens into text; loads no torch and no web library."""
