"""Sweeps whose cells a sweeper of Hydra's proposes, told the objective of those before: Optuna, Nevergrad, others."""
