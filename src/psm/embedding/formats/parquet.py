"""Parquet: path, label and embedding, a row group a block. Needs pyarrow."""

from pathlib import Path

import numpy as np

from psm.embedding.table import Content, Table, about_text, parse_about
from psm.utils.errors import UserError

KEY = b"psm"  # of the description in the file's metadata


def check() -> None:
    """Refuse where pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise UserError(
            "Parquet needs pyarrow: pip install 'psm[parquet]', or give a file that ends in .npy, .npz, .csv, .pt or "
            ".safetensors."
        ) from None


def write(path: Path, table: Table) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    width = table.embeddings.shape[1]
    number = pa.float16() if table.embeddings.dtype == np.float16 else pa.float32()
    columns = [pa.field("path", pa.string()), pa.field("embedding", pa.list_(number, width))]
    if table.labels is not None:
        columns.insert(1, pa.field("label", pa.string()))
    schema = pa.schema(columns, metadata={KEY: about_text(table.about).encode()})
    # Neither dictionaries nor statistics: embeddings do not repeat, and nobody filters by their size.
    options = {"compression": "none", "use_dictionary": ["label"], "write_statistics": ["path", "label"]}
    with pq.ParquetWriter(path, schema, **options) as writer:
        for block in table.blocks():
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(block.embeddings.reshape(-1)), width)
            arrays = [pa.array(block.paths, pa.string()), vectors]
            if block.labels is not None:
                arrays.insert(1, pa.array(block.class_names(table.classes), pa.string()))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(block.paths))


def read(path: Path) -> Content:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, memory_map=True) as file:
        schema = file.schema_arrow
        about = parse_about((schema.metadata or {}).get(KEY))
        labeled = "label" in schema.names
        kind = schema.field("embedding").type
        embeddings = np.empty((file.metadata.num_rows, kind.list_size), kind.value_type.to_pandas_dtype())
        paths: list[str] = []
        labels: list[str | None] = []
        for group in range(file.metadata.num_row_groups):
            rows = file.read_row_group(group)
            start = len(paths)
            paths += rows["path"].to_pylist()
            labels += rows["label"].to_pylist() if labeled else ()
            for chunk in rows["embedding"].chunks:
                values = chunk.flatten().to_numpy(zero_copy_only=False).reshape(len(chunk), kind.list_size)
                embeddings[start : start + len(chunk)] = values
                start += len(chunk)
    return Content(embeddings, paths, about, names=labels if labeled else None)
