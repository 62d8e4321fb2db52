"""Stands in for SGLang's compiled kernels: every name can be imported, and says its name when it is called.

A dense model on a CPU calls none of them.
"""

__version__ = "99.0.0"
__path__: list = []


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} needs SGLang's compiled kernels, which a CPU does not have")

    missing.__name__ = name
    return missing
