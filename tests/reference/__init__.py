"""Slow, obvious NumPy versions of the layers, one token and one head at a time, straight from the equations."""
