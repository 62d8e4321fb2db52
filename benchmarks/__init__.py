"""Measurements against peers and of where time goes. Scripts to run, not part of the package."""
