"""Tables of source code with one row per file: The Stack's columns, and the plainer names that others use."""

from collections.abc import Iterator
from dataclasses import dataclass

from block_recurrent.data.files import open_file
from block_recurrent.errors import UserError

# What is read, under the first of these names that a table has.
COLUMNS = {
    "repository": ("max_stars_repo_name", "repo_name", "repository", "repo"),
    "path": ("max_stars_repo_path", "path", "file_path"),
    "content": ("content", "code", "text"),
    "licences": ("max_stars_repo_licenses", "licenses", "license", "detected_licenses"),
}
BATCH = 128  # rows in memory at once


@dataclass(frozen=True)
class Row:
    repository: str
    path: str
    content: bytes
    licences: tuple[str, ...]


def is_table(name: str) -> bool:
    return name.lower().endswith(".parquet")


def columns(names: list[str], place: str, licences: bool) -> dict[str, str]:
    """The table's own names of the columns that are read."""
    found = {}
    for meaning, candidates in COLUMNS.items():
        if meaning == "licences" and not licences:
            continue
        found[meaning] = next((name for name in candidates if name in names), None)
        if found[meaning] is None:
            raise UserError(f"{place} has no column {candidates[0]} (nor {', '.join(candidates[1:])})")
    return found


def row_groups(place: str, licences: bool) -> list[int]:
    """The bytes of each group of rows, uncompressed, from the footer alone; a UserError where it is no such table."""
    import pyarrow.parquet

    with open_file(place) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{place} is no parquet file, or a damaged one: {told(error)}") from error
        columns(names, place, licences)
        return [table.metadata.row_group(group).total_byte_size for group in range(table.metadata.num_row_groups)]


def rows(place: str, groups: list[int], licences: bool) -> Iterator[Row]:
    """The rows of some groups, a few at a time."""
    import pyarrow.parquet

    with open_file(place) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
            named = columns(table.schema_arrow.names, place, licences)
            for batch in table.iter_batches(BATCH, row_groups=groups, columns=list(named.values())):
                values = {meaning: batch.column(name) for meaning, name in named.items()}
                repositories, paths = texts(values["repository"]), texts(values["path"])
                given = values["licences"].to_pylist() if licences else [None] * len(paths)
                # As bytes: text that is not UTF-8 is for the filters to find.
                contents = values["content"].cast(pyarrow.large_binary())
                for row, content in enumerate(contents):
                    path = paths[row].lstrip("/")  # some tables write paths from the repository's root
                    yield Row(repositories[row], path, content.as_py() or b"", listed(given[row]))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(
                f"{place} is damaged in its row groups {groups[0]} to {groups[-1]}: {told(error)}"
            ) from error


def texts(column) -> list[str]:
    """A column of names, none of which fails: "" for what is missing, a mark for what is not UTF-8."""
    import pyarrow

    return [(name or b"").decode(errors="replace") for name in column.cast(pyarrow.large_binary()).to_pylist()]


def listed(licences: list[str] | str | None) -> tuple[str, ...]:
    """A row's licences, which are one or several."""
    return (licences,) if isinstance(licences, str) else tuple(licence for licence in licences or () if licence)


def told(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
