"""slime: post-training of language models by reinforcement learning, from a laptop CPU to a cluster.

Importing this package needs nothing but the standard library; heavy libraries load where they are used.
"""

__version__ = "0.1.0"
