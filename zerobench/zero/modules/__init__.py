"""Modules as the engine sees them: groups that are units, tied and large layers, models without memory."""
