"""Incremental weight updates: hpZ's copies follow the steps of an optimizer, code by code."""
