"""Settings of the scores of a frozen encoder, a group each. Imports nothing heavy."""

from dataclasses import dataclass

from psm.config.keys import key

# The kinds of scores, in the order in which they are computed; each is a group of keys of `psm evaluate`.
SCORES = ("knn", "linear", "logistic", "few_labels", "retrieval", "clusters", "rankme", "lidar")


@dataclass
class KnnConfig:
    """Weighted nearest neighbors on frozen features."""

    enabled: bool = key(True, "score by nearest neighbors")
    k: int | list[int] = key(
        20,
        "neighbors that vote (fewer where there are fewer training images); a list gives a score for each",
        at_least=1,
        filled=True,
    )
    temperature: float | list[float] = key(
        0.1,
        "a vote weighs exp(cosine similarity / temperature); a list gives a score for each",
        above=0,
        filled=True,
    )

    @property
    def counts(self) -> list[int]:
        """All values of k."""
        return self.k if isinstance(self.k, list) else [self.k]

    @property
    def temperatures(self) -> list[float]:
        """All temperatures."""
        return self.temperature if isinstance(self.temperature, list) else [self.temperature]


@dataclass
class LinearConfig:
    """The paper's linear protocol: one linear layer on the frozen encoder."""

    enabled: bool = key(True, "score by a linear layer")
    epochs: int = key(100, "how often the training features are seen", at_least=1)
    batch_size: int = key(256, "images a step", at_least=1)
    lr: float = key(
        0.1, "learning rate of SGD, falling by a cosine to zero; features are standardized first", at_least=0
    )
    lr_grid: list[float] | None = key(
        None,
        "choose among these rates on 10 % of the training images; none: lr, and a fixed grid for baselines",
        at_least=0,
        filled=True,
    )
    momentum: float = key(0.9, "momentum of SGD", at_least=0, below=1)
    weight_decay: float = key(0.0, "weight decay", at_least=0)
    augment: bool = key(False, "random crops and flips at every epoch (features are then computed anew each time)")


@dataclass
class LogisticConfig:
    """Logistic regression on frozen features, by L-BFGS: no learning rate."""

    enabled: bool = key(False, "score by logistic regression")
    c_grid: list[float] = key(
        [1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0],
        "weights of the data against the penalty (scikit-learn's C), chosen from on held-out training images",
        above=0,
        filled=True,
    )


@dataclass
class FewLabelsConfig:
    """Classifiers trained on few of the training labels."""

    enabled: bool = key(False, "score with few labels")
    amounts: list[str] = key(
        ["1%", "10%"], "how many labels: percentages, or a number a class: [1%,10%,5]", filled=True
    )
    draws: int = key(5, "random draws of the labels; scores are means over them", at_least=1)
    classifiers: list[str] = key(
        ["logistic"], "which classifiers: [logistic,knn,linear]", choices=("logistic", "knn", "linear"), filled=True
    )


@dataclass
class RetrievalConfig:
    """Images of the query's class, ranked by cosine similarity: mean average precision (mAP)."""

    enabled: bool = key(False, "score by retrieval")
    gallery: str = key(
        "test",
        "what each test image is to find: test (all other test images) or train (the training images)",
        choices=("test", "train"),
    )


@dataclass
class ClustersConfig:
    """k-means clusters of the test images beside their classes: normalized mutual information (NMI)."""

    enabled: bool = key(False, "score by clusters")
    k: int | None = key(None, "number of clusters; none: that of the classes", at_least=2)
    starts: int = key(5, "starts of k-means, of which the tightest clusters count", at_least=1)


@dataclass
class RankMeConfig:
    """RankMe, the effective rank of the features by the entropy of their singular values; needs no labels."""

    enabled: bool = key(False, "measure RankMe")
    images: int = key(25_600, "training images that it is measured on, at most", at_least=2)
    space: str = key(
        "features",
        "of the encoder's features, or of the projections, as in its paper (needs a checkpoint)",
        choices=("features", "projections"),
    )


@dataclass
class LidarConfig:
    """LiDAR, the rank of what tells images apart beside what their views differ in; needs no labels."""

    enabled: bool = key(False, "measure LiDAR")
    images: int = key(1000, "training images, at most; more than the width of the features", at_least=2)
    views: int = key(50, "random views of each image, as in training", at_least=2)
    delta: float = key(1e-4, "added to the variance within images", above=0)
    space: str = key(
        "features",
        "of the encoder's features, or of the projections, as in its paper (needs a checkpoint)",
        choices=("features", "projections"),
    )
