"""stub"""
from openrnn.backends.base import Backend, Capabilities
class Cpu(Backend):
    name="cpu"
    can=Capabilities()
    def absent(self): return "not yet"
