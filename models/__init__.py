"""The architectures, one file per paper, built from block_recurrent.layers only."""
