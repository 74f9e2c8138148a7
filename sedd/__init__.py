"""Score entropy discrete diffusion (SEDD) of protein sequences: network, mathematics, data."""
