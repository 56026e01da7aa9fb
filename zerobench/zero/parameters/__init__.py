"""Parameters as users see them while the engine manages their values: hidden, written to, in any memory order."""
