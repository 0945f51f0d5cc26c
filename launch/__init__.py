"""From a laptop to a TPU pod slice and back; see launch/README.md."""
