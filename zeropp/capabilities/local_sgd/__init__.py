"""Local SGD (DiLoCo): replicas train independently and synchronize every n steps."""
