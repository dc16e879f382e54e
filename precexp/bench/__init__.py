"""Measured ratios: each benchmark interleaves what it compares in one run."""
