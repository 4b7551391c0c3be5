"""The version of hpml."""

__version__ = "0.1.0"
