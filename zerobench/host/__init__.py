"""This process, its machine and its job: device, signals, streams, temporary folders; other launchers and their store.

Everything but the engine, theory and the row types may import it.
"""
