"""Typed requests to runners: names, splits, and requests that a runner does not support."""

import pytest

from raysgd._internal.context import Request
from raysgd.loop.requests import (
    RngStateRequest,
    TrainRequest,
    UpdateSchedulersRequest,
    ValidateRequest,
)
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from raysgd.train.runner import FunctionRunner, NextRequest
from tests.operators import Classifier


def test_a_request_has_the_name_of_its_class_or_of_the_method_that_users_call():
    assert RngStateRequest().name == "rng_state"
    assert UpdateSchedulersRequest(call=0, metric=1.0).name == "update_scheduler"
    assert Request().name == ""


def test_only_a_request_to_train_can_split_its_batches():
    request = TrainRequest(call=0, until_step=3)
    assert request.with_split(2) == TrainRequest(call=0, until_step=3, split=2)
    with pytest.raises(NotImplementedError, match="validate does not train"):
        ValidateRequest(call=0).with_split(2)


def test_a_runner_refuses_requests_of_the_other_family():
    operators = TorchRunner(TorchOptions(training_operator_cls=Classifier))
    with pytest.raises(NotImplementedError, match="do not support next"):
        operators.handle(NextRequest())
    with pytest.raises(NotImplementedError, match="functions do not support train"):
        FunctionRunner(False).handle(TrainRequest(call=0))
