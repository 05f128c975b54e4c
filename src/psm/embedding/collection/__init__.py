"""What the embeddings of a collection say: neighbors, near-duplicates, outliers, clusters, a map, doubtful labels."""

from psm.embedding.collection.analyze import Collection, analyze

__all__ = ["Collection", "analyze"]
