"""Jobs started by an external launcher (torchrun, srun, mpirun): their ranks, their store, and the values in it."""
