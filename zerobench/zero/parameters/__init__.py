"""Parameters as users see them while the engine holds their values: hidden, written to, in any memory order."""
