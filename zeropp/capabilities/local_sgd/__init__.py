"""Local SGD (DiLoCo): replicas train independently and synchronize every n steps.

In names of files, keys of checkpoints and messages to users, a node is a replica: it is its own
launch or a part of one. `agreed` are the global parameters, a `difference` is a pseudo-gradient,
and an exchange is the communication of an outer step.
"""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
