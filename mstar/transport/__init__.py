"""Messages between mstar's processes, and the sockets that carry them."""
