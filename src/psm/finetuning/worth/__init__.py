"""Was pretraining worth it? Classifiers from scratch, on frozen features and fine-tuned, by the number of labels."""
