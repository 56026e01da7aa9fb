"""`zerobench estimate --published FILE`: others' measured peaks, each beside the estimate of its configuration."""
