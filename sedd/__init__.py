"""Score entropy discrete diffusion (SEDD) of proteins: network, mathematics, weights, batches."""
