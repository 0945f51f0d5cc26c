"""What one does with a trained model: evaluate and generate, from a workdir alone."""
