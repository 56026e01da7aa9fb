"""`zerobench export`: finished runs for other programs."""
