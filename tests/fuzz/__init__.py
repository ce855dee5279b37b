"""Random calls and random cells against the reference: `make fuzz`, or `python -m tests.fuzz`.

Each draw follows from a seed, a kind and a number alone, and ends in the right answer, in one
sentence of ours, or in a fault. It judges from outside: it imports what users import, the traces
and the printers, and nothing of `tests/`.
"""
