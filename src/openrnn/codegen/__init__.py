"""From a cell to its kernels: the traced step, its derivative, and their printed source."""

from openrnn.codegen.show import show

__all__ = ["show"]
