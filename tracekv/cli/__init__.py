"""The ``tracekv`` command."""
