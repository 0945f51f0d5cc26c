"""One jitted step over a mesh, its optimizers, and the loop around it."""
