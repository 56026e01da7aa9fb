"""Every byte between ranks: one seam, and the ways collectives travel."""
