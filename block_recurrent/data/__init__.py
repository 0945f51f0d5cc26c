"""Documents in, batches out: sources and vocabularies, the prepared store, and the rows that read it."""
