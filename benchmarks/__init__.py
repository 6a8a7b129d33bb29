"""Benchmarks, started as modules from the clone's root: see README.md beside this file."""
