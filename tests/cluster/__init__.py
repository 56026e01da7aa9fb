"""Tests that need a cluster's own software: a real SLURM of two nodes on this machine, Open MPI's mpirun."""
