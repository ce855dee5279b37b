"""cuDNN's recurrent API through ctypes, on the library that torch has loaded."""
