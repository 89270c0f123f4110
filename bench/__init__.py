"""One file for each question; `python -m bench NAME --json FILE` runs it."""
