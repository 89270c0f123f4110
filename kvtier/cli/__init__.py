"""The command `kvtier`: see `main.py`."""
