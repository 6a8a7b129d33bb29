"""The ranks of a planned run, and the parts of its model that they have."""
