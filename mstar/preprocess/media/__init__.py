"""Media from the bytes that users send: decoded, checked and bounded."""
