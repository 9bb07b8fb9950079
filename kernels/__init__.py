"""Kernels: one function an operation, several backends behind it, all tested against a plain reference."""
