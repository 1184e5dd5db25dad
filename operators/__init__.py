"""Ready-made training operators. Configure them, or derive your own from them.

::

    from raysgd import TorchTrainer
    from raysgd.operators import ImageClassifier

    config = {"model": make_model, "train_data": digits, "validation_data": held_out, "lr": 1e-3}
    with TorchTrainer(training_operator_cls=ImageClassifier, config=config, num_workers=2) as t:
        t.train()
        print(t.validate())

=========================  ============================================================
`ImageClassifier`          cross-entropy, accuracy top-1 and top-k
`SemanticSegmenter`        a class for each pixel; exact mean intersection over union
`GAN`                      two models and two optimizers
`LanguageModel`            next-token prediction; exact perplexity, tied weights
`SequenceClassifier`       transformers models built from a config; exact macro F1
`Regressor`                MSE, L1 or Huber; exact R²
`WithMetrics`              TorchMetrics for any operator, exact over all workers
`ConfiguredOperator`       base class of the operators above
`SupervisedOperator`       base class for one model and a target
=========================  ============================================================

``pip install "raysgd[operators]"`` installs their optional dependencies, torchmetrics and
transformers.
"""

from raysgd.operators.base import ConfiguredOperator, SupervisedOperator
from raysgd.operators.classifiers import ImageClassifier, SemanticSegmenter, SequenceClassifier
from raysgd.operators.gan import GAN
from raysgd.operators.language_model import LanguageModel
from raysgd.operators.regressor import Regressor
from raysgd.operators.with_metrics import WithMetrics

__all__ = [
    "GAN",
    "ConfiguredOperator",
    "ImageClassifier",
    "LanguageModel",
    "Regressor",
    "SemanticSegmenter",
    "SequenceClassifier",
    "SupervisedOperator",
    "WithMetrics",
]
