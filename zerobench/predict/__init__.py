"""What a cell will need and do, before or beside the run: its model built without memory, bytes, arithmetic."""
