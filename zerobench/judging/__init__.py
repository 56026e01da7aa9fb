"""Verdicts on measured figures, which the verbs budget, compare and report and the gate of tests share.

budget_file.py    budgets as yaml; recording.py updates their limits and explains each change
judge.py          limits of metrics, and the findings of a cell
lines.py          lines of code with bytes at the peak or growth, and their changes between two measurements
comparison.py     two sets of runs, cell by cell; paired.py compares times, noise_floor.py measures identical code
reports.py        findings for the terminal, JUnit, Markdown and charts; github.py annotates lines in a workflow
"""
