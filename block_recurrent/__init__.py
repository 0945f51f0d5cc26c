"""Recurrent transformers for very long documents, in JAX and Flax."""
