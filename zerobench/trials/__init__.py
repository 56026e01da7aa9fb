"""Sweeps whose cells a Hydra sweeper proposes from the objective of earlier ones: Optuna, Nevergrad, others."""
