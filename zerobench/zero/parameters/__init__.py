"""Parameters as users meet them while the engine holds their values: absent, written to, of any memory layout."""
