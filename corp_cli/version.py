"""The version of corp, read by the build and by `corp --version`."""

__version__ = "0.1.0"
