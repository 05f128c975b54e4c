"""Words that other libraries use for settings, and the key of this one that does it."""

from collections.abc import Container

# A word: the keys that may be meant. Those that a command has are named.
WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning_rate", "base_lr"), ("optim.lr", "linear.lr")),
    **dict.fromkeys(("wd", "weight_decay"), ("optim.weight_decay", "linear.weight_decay")),
    **dict.fromkeys(("momentum",), ("optim.momentum", "target.momentum", "linear.momentum")),
    **dict.fromkeys(("ema", "ema_decay", "m", "momentum_encoder"), ("target.momentum",)),
    **dict.fromkeys(("views.target", "weak_aug", "target_aug"), ("target.views",)),
    **dict.fromkeys(("optimizer", "opt"), ("optim.name",)),
    **dict.fromkeys(("warmup", "warmup_epochs"), ("optim.warmup",)),
    **dict.fromkeys(("clip_grad", "gradient_clip_val", "grad_clip"), ("optim.clip",)),
    **dict.fromkeys(("bs", "batch", "batchsize"), ("batch_size",)),
    **dict.fromkeys(("num_epochs", "n_epochs", "max_epochs"), ("epochs", "linear.epochs")),
    **dict.fromkeys(("accumulate_grad_batches", "grad_accum", "micro_batch_size"), ("grad_cache_chunk",)),
    **dict.fromkeys(("k", "topk", "num_neighbors"), ("positives.k", "knn.k", "top")),
    **dict.fromkeys(("temperature", "temp", "tau", "t"), ("loss.temperature", "knn.temperature")),
    **dict.fromkeys(("queue_size", "memory_bank_size", "bank_size", "queue"), ("bank.size",)),
    **dict.fromkeys(("metrics", "metric", "protocol", "protocols"), ("scores",)),
    **dict.fromkeys(("online_probe", "linear_probe", "online_linear"), ("monitor.linear",)),
    **dict.fromkeys(("gpus", "gpu", "num_gpus", "ngpus", "n_gpus"), ("devices", "accelerator")),
    **dict.fromkeys(("device", "cuda"), ("accelerator",)),
    **dict.fromkeys(("nodes", "nnodes"), ("num_nodes",)),
    **dict.fromkeys(("amp", "fp16", "bf16", "half", "mixed_precision"), ("precision",)),
    **dict.fromkeys(("syncbn", "sync_bn"), ("sync_batchnorm",)),
    **dict.fromkeys(("backbone", "arch", "model", "network"), ("encoder",)),
    **dict.fromkeys(("hidden_dim", "proj_hidden_dim"), ("heads.hidden_dim",)),
    **dict.fromkeys(("out_dim", "proj_dim", "feature_dim", "dim", "embedding_dim"), ("heads.out_dim",)),
    **dict.fromkeys(("dataset", "data_dir", "data_path", "data_root", "train_dir"), ("data",)),
    **dict.fromkeys(("root", "download_dir"), ("images.root",)),
    **dict.fromkeys(("image_size", "img_size", "resize"), ("images.size",)),
    **dict.fromkeys(("num_workers", "workers", "n_workers", "num_threads"), ("images.workers",)),
    **dict.fromkeys(("crop_size", "input_size"), ("views.size",)),
    **dict.fromkeys(("output_dir", "output", "save_dir", "log_dir", "logdir", "exp_dir"), ("out",)),
    **dict.fromkeys(
        ("checkpoint", "ckpt", "ckpt_path", "resume_from", "weights"), ("checkpoint", "resume", "init", "run")
    ),
    **dict.fromkeys(
        ("pretrained", "pretrained_weights", "load_from", "init_from", "from_pretrained"), ("init", "checkpoint")
    ),
    **dict.fromkeys(("save_every", "save_freq", "checkpoint_every"), ("save.snapshots", "save.every_steps")),
    **dict.fromkeys(("random_seed", "manual_seed"), ("seed", "seeds")),
    **dict.fromkeys(("logger", "wandb", "tensorboard"), ("loggers",)),
    **dict.fromkeys(("freeze", "freeze_backbone", "linear_probe", "frozen"), ("head_only",)),
    **dict.fromkeys(("smoothing", "label_smooth"), ("label_smoothing",)),
    **dict.fromkeys(("layerwise_lr_decay", "layer_wise_decay", "llrd", "lr_decay"), ("layer_decay",)),
    **dict.fromkeys(("val_share", "val_split", "val_size", "validation_split"), ("validation",)),
    **dict.fromkeys(("augment", "augmentation", "transform"), ("views.enabled", "linear.augment")),
    **dict.fromkeys(("algorithm", "algo", "loss_name"), ("method", "methods")),
}

# Words of settings that do not exist here, and why.
ABSENT: dict[str, str] = {
    **dict.fromkeys(
        ("pin_memory", "prefetch_factor", "persistent_workers"),
        "no key corresponds: where there are worker processes (images.workers), they are two batches ahead",
    ),
    **dict.fromkeys(("num_classes", "n_classes"), "no key corresponds: training uses no labels"),
    **dict.fromkeys(("shuffle", "drop_last"), "no key corresponds: images are shuffled anew at each epoch by seed"),
}

EXAMPLES = {"precision": "precision=16-mixed", "accelerator": "accelerator=gpu", "loggers": "loggers=[wandb]"}


def advice(word: str, known: Container[str], value: str = "...") -> str:
    """What to write instead of a word of the field, as a part of a sentence; empty where it is none."""
    word = word.lower().replace("-", "_")
    if word in ABSENT:
        return ABSENT[word]
    keys = [EXAMPLES.get(key, f"{key}={value}") for key in WORDS.get(word, ()) if _has(key, known)]
    return f"write {' or '.join(keys)}" if keys else ""


def _has(key: str, known: Container[str]) -> bool:
    """True for a key of the command, or an entry of one of its free-form groups."""
    return key in known or key.partition(".")[0] in known
