"""Modules as the engine handles them: units, tied parameters, tiled layers, construction on the meta device."""
