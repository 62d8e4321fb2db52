"""Rows of JSONL and Parquet files, lazily, with slices and places to go on from.

Invariants: rows keep the file's order; a row that cannot be read stops with `file:line`, rows outside the slice are not parsed;
going on at a mark costs no reading of what came before it. Knows files, not what a row means.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any, Protocol

Row = tuple[str, dict[str, Any]]  # ("file:line", row)
Mark = dict[str, int]


def parse_data_path(path: str) -> tuple[str, slice | None]:
    """Split off the `@[a:b]` suffix.

    >>> parse_data_path("a.jsonl@[-3:]")
    ('a.jsonl', slice(-3, None, None))
    """
    match = re.fullmatch(r"(.*)@\[(-?\d*):(-?\d*)\]", path)
    if match is None:
        if "@[" in path:
            raise ValueError(f"data path {path!r}: the slice suffix must look like @[a:b]")
        return path, None
    start, stop = (int(text) if text not in ("", "-") else None for text in match.groups()[1:])
    return match.group(1), slice(start, stop)


def read_rows(path: str) -> Iterator[Row]:
    """Rows of `path[@[a:b]]` with their location.

    Raises:
        FileNotFoundError: no such file. ValueError: wrong extension, or a broken row (names file and line).
    """
    return RowStream(path)


class RowStream(Iterator[Row]):
    """Iterator over `path[@[a:b]]`. `position` counts the rows of the slice that were read.

    Raises: as `read_rows`.
    """

    def __init__(self, path: str) -> None:
        file, part = parse_data_path(path)
        if not os.path.isfile(file):
            what = "is a folder, expected a .jsonl or .parquet file" if os.path.isdir(file) else "does not exist"
            raise FileNotFoundError(f"prompt data {file} {what}")
        extension = os.path.splitext(file)[1]
        if extension not in _FILES:
            raise ValueError(
                f"prompt data {file}: extension {extension!r} is not supported, expected .jsonl or .parquet"
            )
        self._rows: _RowFile = _FILES[extension](file)
        start, stop = _bounds(part, self._rows)
        self._length = None if stop is None else max(0, stop - start)
        self.position = 0
        self._rows.skip(start)

    def __next__(self) -> Row:
        row = None if self._length is not None and self.position >= self._length else self._rows.read()
        if row is None:
            raise StopIteration
        self.position += 1
        return row

    def mark(self) -> Mark:
        """Where `go_to` goes on with the next row."""
        return {"position": self.position, **self._rows.mark()}

    def go_to(self, mark: Mark) -> None:
        self.position = mark["position"]
        self._rows.go_to(mark)


class _RowFile(Protocol):
    def read(self) -> Row | None: ...
    def skip(self, count: int) -> None: ...
    def count(self) -> int: ...
    def mark(self) -> Mark: ...
    def go_to(self, mark: Mark) -> None: ...


def _bounds(part: slice | None, rows: _RowFile) -> tuple[int, int | None]:
    """First row and the one after the last (None: the file's end); the file is counted for a negative bound."""
    if part is None:
        return 0, None
    if (part.start or 0) >= 0 and (part.stop is None or part.stop >= 0):
        return part.start or 0, part.stop
    start, stop, _ = part.indices(rows.count())
    return start, stop


class _JsonLines:
    """One JSON object a line; blank lines are no rows."""

    def __init__(self, file: str) -> None:
        self._file, self._stream = file, open(file, "rb")  # noqa: SIM115 - lives as long as the reader
        self._line = self._offset = 0

    def __del__(self) -> None:
        self._stream.close()

    def _raw(self) -> bytes | None:
        """The next line that is not blank."""
        for raw in self._stream:
            self._line += 1
            self._offset += len(raw)
            if not raw.isspace():
                return raw
        return None

    def read(self) -> Row | None:
        raw = self._raw()
        if raw is None:
            return None
        location = f"{self._file}:{self._line}"
        try:
            text = raw.decode("utf-8-sig" if self._line == 1 else "utf-8").strip()
            row = json.loads(text) if text else None  # a first line of nothing but the byte-order mark
        except ValueError as error:
            raise ValueError(f"{location}: not a JSON object in UTF-8: {error}") from error
        if not text:
            return self.read()
        if not isinstance(row, dict):
            raise ValueError(f"{location}: expected a JSON object, found {type(row).__name__}")
        return location, row

    def skip(self, count: int) -> None:
        for _ in range(count):
            if self._raw() is None:
                return

    def count(self) -> int:
        with open(self._file, "rb") as stream:
            return sum(not raw.isspace() for raw in stream)

    def mark(self) -> Mark:
        return {"line": self._line, "offset": self._offset}

    def go_to(self, mark: Mark) -> None:
        self._line, self._offset = mark["line"], mark["offset"]
        self._stream.seek(self._offset)


class _Parquet:
    """Rows of all row groups; only the group that is being read is held, 1024 rows of it as Python objects."""

    def __init__(self, file: str) -> None:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ImportError(f"reading {file} needs pyarrow: pip install pyarrow") from error
        try:
            self._file, self._table = file, parquet.ParquetFile(file)
        except ValueError as error:  # pyarrow's own are
            raise ValueError(f"{file}: no readable Parquet file: {error}") from error
        self._number = 0
        self._rows: Iterator[dict] | None = None

    def _from(self, number: int) -> Iterator[dict]:
        first = 0
        for group in range(self._table.num_row_groups):
            size = self._table.metadata.row_group(group).num_rows
            if first + size > number:
                skipped = max(0, number - first)
                for batch in self._table.iter_batches(batch_size=1024, row_groups=[group]):
                    if skipped < batch.num_rows:
                        yield from batch.slice(skipped).to_pylist()
                    skipped = max(0, skipped - batch.num_rows)
            first += size

    def read(self) -> Row | None:
        if self._rows is None:
            self._rows = self._from(self._number)
        row = next(self._rows, None)
        if row is None:
            return None
        self._number += 1
        return f"{self._file}:{self._number}", row

    def skip(self, count: int) -> None:
        self.go_to({"row": self._number + count})

    def count(self) -> int:
        return self._table.metadata.num_rows

    def mark(self) -> Mark:
        return {"row": self._number}

    def go_to(self, mark: Mark) -> None:
        self._number, self._rows = mark["row"], None


_FILES = {".jsonl": _JsonLines, ".parquet": _Parquet}
