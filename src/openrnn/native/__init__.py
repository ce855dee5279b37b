"""Bindings of native libraries; nothing is loaded before it is used."""
