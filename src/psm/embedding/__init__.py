"""Embeddings of images: files of them, search among them, and what they say of a collection."""
