"""The engine's handling of modules: units, tied parameters, tiled layers, construction on the meta device."""
