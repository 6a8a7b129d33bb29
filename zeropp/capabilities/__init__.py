"""Capabilities, each in one folder with everything that it says about itself."""
