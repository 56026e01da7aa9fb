"""Processes that somebody else started (torchrun, srun, mpirun): the job, its store, what travels through it."""
