"""tmp"""
convert=None
