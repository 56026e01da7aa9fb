"""Text files that others wrote, read so that an error names the file and nothing is waited for."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """Returns the text of a file. Raises OSError, or ValueError for a pipe, which would be waited for, and for bytes
    that are no UTF-8, each with the file's name.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: it is no file")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:  # in the midst of reading, which names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no text: {error}") from error
