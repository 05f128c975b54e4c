"""Code of the documentation that its test does not run: the page ("" for any), how it begins, and why.

An entry that no longer begins any code of the pages fails the test, and so does code that neither runs nor stands here.
"""

NOT_RUN = (
    ("", "pip install", "installs packages from the network; tests/test_release.py tries wheels in fresh environments"),
    ("", "make test", "is what runs this test"),
    ("README.md", "make demo", "four minutes; the same commands run here with another configuration"),
    ("CONTRIBUTING.md", "git clone", "needs the network"),
    ("CONTRIBUTING.md", "python release/publish.py", "changes the repository; tests/test_publish.py runs it on a copy"),
    ("CONTRIBUTING.md", "git add", "changes the repository"),
    ("docs/reliability.md", "make torture", "minutes to hours"),
    (
        "docs/experiments.md",
        "psm experiment run known-purity",
        "needs the labels of CIFAR-10; tests/test_known_purity.py tries what it registers",
    ),
    ("", "bash benchmarks/", "an hour of measuring"),
    ("docs/speed.md", "python benchmarks/time_to_accuracy.py", "twenty minutes of measuring, and lightly beside it"),
    ("docs/speed.md", "python benchmarks/gpu_check.py", "minutes of measuring; tests/kernels tries what it compares"),
    ("docs/scaling.md", "python benchmarks/cost_model.py", "ten minutes of measuring"),
    ("docs/cluster.md", "torchrun", "two hosts; tests/training/test_launch.py starts torchrun on one"),
    ("docs/cluster.md", "ray start", "a cluster; tests/experiments/test_ray.py has one of two nodes"),
    ("docs/cluster.md", "#!/bin/bash", "needs SLURM; tests/training/test_launch.py has its variables"),
    ("docs/cluster.md", "psm experiment run table1 preset=paper out=/shared/study cluster=slurm", "needs SLURM"),
    (
        "docs/run-folder.md",
        "psm runs serve",
        "serves until it is stopped; tests/reporting/test_runs.py asks it for pages",
    ),
    ("docs/export.md", "hf upload", "needs the network and an account"),
    ("docs/data.md", 'psm.pretrain("runs/a", data=torchvision.datasets.Flowers102', "downloads 330 MB"),
)

# Commands that their page says are refused: they must be.
REFUSED = (("docs/configuration.md", "psm pretrain out=runs/a resume=true epochs=400"),)
