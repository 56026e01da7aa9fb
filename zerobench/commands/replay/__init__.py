"""`zerobench replay`: the recorded step of several strategies side by side, as a page that moves and as a film."""
