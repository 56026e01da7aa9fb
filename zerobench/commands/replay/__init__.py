"""`zerobench replay`: the recorded step of several strategies side by side, as an animated page."""
