"""The version of mstar, as the distribution and the server report it."""

__version__ = "0.1.0"
