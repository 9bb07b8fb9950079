"""Kernels: one function per operation, several backends behind it, all tested against a plain reference."""
