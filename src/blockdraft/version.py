"""The version of the package, as its metadata states it."""

__version__ = "0.1.0"
