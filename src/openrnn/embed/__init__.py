"""Layers for programs without Python: an object file, a C header, a shared library."""

from openrnn.embed.export import export_native as export_native
