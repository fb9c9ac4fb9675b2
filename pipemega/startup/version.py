"""The version, in a module that setup.py can run without importing the package."""

__version__ = "0.1.0"
