"""Helpers for libraries that build on PyTorch; each module imports its library only when it is used."""
