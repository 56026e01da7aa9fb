"""Dispatches the launches of a sweep to the jobs of a launcher of Hydra's: SLURM's, Ray's, processes side by side."""
