"""The verbs of the command line: one module per verb, with a function of its name.

The command line (cli.py) alone imports it, module by module.
"""
