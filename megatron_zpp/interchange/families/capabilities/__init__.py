"""What capabilities add to families of models: found by listing, so that no table names them.

A module has the kinds of settings and the forms that rows of the tables name. It may have COUNTS:
how many modules of a kind a model has, by what stands for their numbers in names; and CANONICAL:
functions that return fields of a model in their canonical spelling.
"""
