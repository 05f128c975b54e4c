"""The losses as functions of embeddings."""
