"""PretrainModule: the step, the trainer, checkpoints, several processes."""
