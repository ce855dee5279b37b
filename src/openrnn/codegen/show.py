show=None
