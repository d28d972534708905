"""Tests: from the directory sdk/python, `PYTHONPATH=src python3 -m unittest`."""
