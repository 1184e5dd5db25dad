"""A worker's end of a channel, with any function in place of the worker's calls."""

from raysgd.cluster.channels import Requests

__all__ = ["serve"]


def serve(address, carry_out):
    """Serve a channel until the driver hangs up."""
    requests = Requests(address)
    for request in requests:
        requests.answer(carry_out(*request))
    return requests.served
