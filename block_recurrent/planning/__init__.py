"""What a run costs before it is paid for: from shapes in seconds, from the TPU compiler in minutes."""
