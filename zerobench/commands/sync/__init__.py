"""`zerobench sync`: merges results folders, by the content of what is in them."""
