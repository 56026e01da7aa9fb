"""Dispatches the launches of a sweep to the jobs of a Hydra launcher: SLURM, Ray, parallel processes."""
