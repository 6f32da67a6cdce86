"""Benchmarks: rows of JSON lines with a fixed form, tables and plots drawn from them."""
